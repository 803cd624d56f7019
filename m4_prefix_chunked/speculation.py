"""Speculation without a draft model: decode rows of 1 + k tokens, k of them guessed (draft tokens).

    known       ... the cat              the last one is computed, and a token sampled after it
    row         cat | sat  on  her       three draft tokens are computed with it, in the same step
    sampled     sat | on   the  .        after each a token, by the noise of its position
                 =    =    !             "sat" and "on" are accepted; "the" comes instead of "her"

Tokens sampled after a wrong token are dropped. Every token that is kept was sampled after right
tokens, so it is the token that would have come one by one: greedy or not, no token ever differs. A
step that computes few tokens waits for its weights and not for its arithmetic: three more tokens
cost little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from milestone_llm.core.allowed_tokens import AllowedTokens
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

from .config import EngineConfig
from .kv_cache_manager import KVCacheManager
from .ngram import NgramProposer

MAX_REST = 32


class Proposer(Protocol):
    """Makes draft tokens: `NgramProposer`, or another. Wrong ones cost time, nothing more."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens that may come after the known ones."""


@dataclass(slots=True)
class GuessingRow(ScheduledRequest):
    """A decode row whose last tokens are draft tokens, kept as far as they equal the sampled
    tokens."""

    draft_token_ids: list[int] = field(default_factory=list)
    """Draft tokens after the known ones."""
    num_missing: int = 0
    """Number of draft tokens that a device was asked to make, and did not make."""
    num_accepted: int | None = None
    """Number of draft tokens that were accepted; None: not known yet."""

    def __post_init__(self) -> None:
        """Let the row sample for its own request only: a token before the draft tokens, and one
        after each of them."""
        self.sampling_requests = [self.request]
        self.num_sampled_tokens = 1 + len(self.draft_token_ids)

    @classmethod
    def of(cls, row: ScheduledRequest, guesses: list[int]) -> GuessingRow:
        """Return a row that takes the place of a plain one, with draft tokens after its last
        token."""
        return cls(
            row.request,
            row.start,
            row.num_new_tokens + len(guesses),
            blocks=row.blocks,
            num_cached_tokens=row.num_cached_tokens,
            draft_token_ids=guesses,
        )

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute, draft tokens last."""
        return self.request.token_ids[self.start : self.end] + self.draft_token_ids

    @property
    def phase(self) -> str:
        """`decode`, always: no other row has draft tokens."""
        return "padding" if self.is_padding else "decode"

    @property
    def figures(self) -> dict[str, int]:
        """Number of draft tokens, and how many of them were accepted."""
        return {
            **super(GuessingRow, self).figures,
            "num_draft_tokens": len(self.draft_token_ids),
            "num_accepted_tokens": self.num_accepted or 0,
        }


def draft_token_ids(row: ScheduledRequest) -> list[int]:
    """Return the draft tokens of a row; a plain row has none."""
    return row.draft_token_ids if isinstance(row, GuessingRow) else []


@dataclass(frozen=True)
class GuessedRequest:
    """A request as it would be if some draft tokens were right, for sampling after them."""

    request: Request
    guesses: list[int]

    @property
    def sampling_params(self) -> SamplingParams:
        """The request's own."""
        return self.request.sampling_params

    @property
    def seed(self) -> int:
        """The request's own."""
        return self.request.seed

    @property
    def token_ids(self) -> list[int]:
        """The known tokens, then the draft tokens."""
        return self.request.token_ids + self.guesses

    @property
    def num_output_tokens(self) -> int:
        """Number of known output tokens and draft tokens together."""
        return self.request.num_output_tokens + len(self.guesses)

    @property
    def num_known_tokens(self) -> int:
        """The known ones of the output."""
        return self.request.num_output_tokens

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The request's own."""
        return self.request.stop_token_ids

    @property
    def allowed_tokens(self) -> AllowedTokens | None:
        """The request's own rule, which depends on nothing but the tokens that it is given."""
        return self.request.allowed_tokens


def accept(guesses: list[int], sampled: list[SampledToken]) -> list[SampledToken]:
    """Return the sampled tokens to keep: up to the first that differs from the draft token in its
    place, this one included. Each kept token is the one that would have come without drafts."""
    for place, guess in enumerate(guesses):
        if sampled[place].token_id != guess:
            return sampled[: place + 1]
    return sampled


@dataclass
class Luck:
    """Back-off: from the third miss in a row on, each miss doubles the pause before the next draft.

    The first two misses cost no pause: a repetition may go on after a word that differs.
    """

    num_misses: int = 0
    rest: int = 0
    """Steps without draft tokens that are left."""

    def note(self, has_hit: bool) -> None:
        """Note that a row with room for draft tokens has been computed. It is a hit if at least one
        draft token was accepted."""
        self.num_misses = 0 if has_hit else self.num_misses + 1
        self.rest = min(2 ** max(0, self.num_misses - 2), MAX_REST) - 1


@dataclass
class SpeculationCounts:
    """Counts of draft tokens since the start: made, and accepted."""

    num_drafts: int = 0
    """Rows with draft tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: Counter[int] = field(default_factory=Counter)
    """How many first, second ... draft tokens of a row were accepted."""

    def note(self, row: GuessingRow) -> None:
        """Count a row whose draft tokens have been settled."""
        num_accepted = row.num_accepted or 0
        if row.draft_token_ids:  # a device may have found none
            self.num_drafts += 1
            self.num_draft_tokens += len(row.draft_token_ids)
            self.num_accepted_tokens += num_accepted
            self.num_accepted_per_position.update(range(num_accepted))

    def stats(self) -> dict[str, Any]:
        """Return the counts by the names that vLLM gives them."""
        positions = self.num_accepted_per_position
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": [positions[i] for i in sorted(positions)],
        }


class Speculation:
    """Gives draft tokens to decode rows, from the budget that all rows have left of a step.

    Args:
        kv: block tables, in which draft tokens need room.
        proposer: makes draft tokens; None: an `NgramProposer`.
        can_guess: whether a runner can compute these rows with draft tokens; None: it always can.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        proposer: Proposer | None = None,
        can_guess: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        self.kv = kv
        self.proposer = proposer or NgramProposer()
        self.can_guess = can_guess or (lambda plan: True)
        self.counts = SpeculationCounts()
        self.num_tokens = config.num_speculative_tokens
        self.max_rows = config.num_rows_that_guess
        self._luck = WeakKeyDictionary[Request, Luck]()  # forgotten with their requests
        self._guessing: list[GuessingRow] = []
        """Rows with draft tokens whose results are not known yet."""

    def extend(self, plan: StepPlan, budget: int) -> None:
        """Add draft tokens to the rows of a plan, within budget and free memory.

        No request is preempted for draft tokens. A step that has preempted a request gets none, nor
        does a step that computes a prompt or many rows: there is no idle arithmetic in those.
        """
        self._learn()
        if plan.preempted or len(plan.rows) > self.max_rows:
            return
        is_idle = all(
            row.phase == "decode" and row.sampling_requests == [row.request] for row in plan.rows
        )
        if not (is_idle and self.can_guess(plan)):
            return
        for place, row in enumerate(plan.rows):
            request, luck = row.request, self._luck.setdefault(row.request, Luck())
            longest = request.max_num_tokens - request.num_tokens - 1  # one token comes after them
            most = min(self.num_tokens, longest, budget)
            luck.rest -= 1
            if most <= 0 or luck.rest >= 0:
                continue
            guesses = self.proposer.propose(request, most)
            if request.allowed_tokens is not None:
                output = request.output_token_ids
                guesses = request.allowed_tokens.continuation(output, guesses, most)
            if guesses and self.kv.append(request, plan, len(guesses)):
                guessing = GuessingRow.of(row, guesses)
                plan.rows[place] = guessing
                self._guessing.append(guessing)
                budget -= len(guesses)

    def settle(self, plan: StepPlan, sampled: dict[str, list[SampledToken]]) -> None:
        """Take rejected draft tokens out of the plan, and correct the start of rows that were
        launched meanwhile.

        Must run before tokens are appended: the KV of a rejected draft token is not the KV of the
        token that comes in its place.
        """
        for row in plan.rows:
            request = row.request
            if row.is_padding or request.is_finished or not row.samples:
                continue
            num_guesses = len(draft_token_ids(row))
            # Sooner by the tokens that the step before rejected: unknown when the row was planned.
            row.start = min(row.start, len(request.token_ids) + num_guesses - row.num_new_tokens)
            if not isinstance(row, GuessingRow):
                continue
            row.num_accepted = len(sampled[request.request_id]) - 1
            num_rejected = num_guesses - row.num_accepted
            row.draft_token_ids = row.draft_token_ids[: num_guesses - row.num_missing]
            row.num_new_tokens -= num_rejected
            plan.num_padding_tokens += num_rejected
            request.num_in_flight -= num_rejected
            request.num_computed_tokens -= min(num_rejected, request.num_computed_tokens)
            self.counts.note(row)

    def _learn(self) -> None:
        """Note which rows had accepted draft tokens."""
        for row in self._guessing:
            if row.num_accepted is not None:
                self._luck.setdefault(row.request, Luck()).note(row.num_accepted > 0)
        self._guessing = [
            row for row in self._guessing if row.num_accepted is None and row.request.num_in_flight
        ]
