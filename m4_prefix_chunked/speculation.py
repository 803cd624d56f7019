"""Speculation without a draft model: a decode row of 1 + k tokens, k of them guessed.

    known       ... the cat              the last one is computed, and a token sampled behind it
    row         cat | sat  on  her       three guesses are computed with it, in the same step
    sampled     sat | on   the  .        behind each a token, by the noise of its position
                 =    =    !             "sat" and "on" came true; "the" comes in place of "her"

What is sampled behind a wrong token is dropped. All that is kept was sampled behind the right
ones, so it is what would have come one by one: greedy or not, no token ever differs. A step that
computes few tokens waits for its weights and not for its arithmetic: three more cost little.
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
    """Guesses tokens: `NgramProposer`, or whatever else. Bad guesses cost time, nothing more."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that may come behind the known ones."""


@dataclass(slots=True)
class GuessingRow(ScheduledRequest):
    """A decode row whose last tokens are guesses, kept as far as they are what is sampled."""

    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses at the tokens behind the known ones."""
    num_missing: int = 0
    """How many of them a device was to make, and did not."""
    num_accepted: int | None = None
    """How many of them have come true; None: not known yet."""

    def __post_init__(self) -> None:
        """It samples for its own request alone: a token behind each guess, and one before."""
        self.sampling_requests = [self.request]
        self.num_sampled_tokens = 1 + len(self.draft_token_ids)

    @classmethod
    def of(cls, row: ScheduledRequest, guesses: list[int]) -> GuessingRow:
        """A row that takes the place of a plain one, with guesses behind its last token."""
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
        """The tokens to compute, guesses last."""
        return self.request.token_ids[self.start : self.end] + self.draft_token_ids

    @property
    def phase(self) -> str:
        """Only rows that decode guess."""
        return "padding" if self.is_padding else "decode"

    @property
    def figures(self) -> dict[str, int]:
        """How many tokens were guessed, and how many of them came true."""
        return {
            **super(GuessingRow, self).figures,
            "num_draft_tokens": len(self.draft_token_ids),
            "num_accepted_tokens": self.num_accepted or 0,
        }


def draft_token_ids(row: ScheduledRequest) -> list[int]:
    """The guesses of a row; a plain one has none."""
    return row.draft_token_ids if isinstance(row, GuessingRow) else []


@dataclass(frozen=True)
class GuessedRequest:
    """A request as it would be if some guesses had come true, for sampling behind them."""

    request: Request
    guesses: list[int]

    @property
    def sampling_params(self) -> SamplingParams:
        """The request's."""
        return self.request.sampling_params

    @property
    def seed(self) -> int:
        """The request's."""
        return self.request.seed

    @property
    def token_ids(self) -> list[int]:
        """The known tokens, then the guesses."""
        return self.request.token_ids + self.guesses

    @property
    def num_output_tokens(self) -> int:
        """The known ones of the output, and the guesses."""
        return self.request.num_output_tokens + len(self.guesses)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The request's."""
        return self.request.stop_token_ids

    @property
    def allowed_tokens(self) -> AllowedTokens | None:
        """The request's, which goes by the tokens that it is given."""
        return self.request.allowed_tokens


def accept(guesses: list[int], sampled: list[SampledToken]) -> list[SampledToken]:
    """What is kept of the tokens sampled before and behind guesses: up to the first that differs
    from the guess in its place. A token then comes as if those before it had come one by one."""
    for place, guess in enumerate(guesses):
        if sampled[place].token_id != guess:
            return sampled[: place + 1]
    return sampled


@dataclass
class Luck:
    """How a request's guesses have fared: from the third miss in a row on, each doubles the rest.

    The first two cost none: repeats go on behind a word that differs.
    """

    num_misses: int = 0
    rest: int = 0
    """Steps without guesses that are left."""

    def note(self, has_hit: bool) -> None:
        """A row with room for guesses has been computed; a hit is at least one that came true."""
        self.num_misses = 0 if has_hit else self.num_misses + 1
        self.rest = min(2 ** max(0, self.num_misses - 2), MAX_REST) - 1


@dataclass
class SpeculationCounts:
    """What has become of guesses since the start."""

    num_drafts: int = 0
    """Rows with guesses."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: Counter[int] = field(default_factory=Counter)
    """How many first, second ... guesses of a row have come true."""

    def note(self, row: GuessingRow) -> None:
        """Count a row whose guesses have been settled."""
        num_accepted = row.num_accepted or 0
        if row.draft_token_ids:  # a device may have found none
            self.num_drafts += 1
            self.num_draft_tokens += len(row.draft_token_ids)
            self.num_accepted_tokens += num_accepted
            self.num_accepted_per_position.update(range(num_accepted))

    def stats(self) -> dict[str, Any]:
        """The counts by the names that vLLM gives them."""
        positions = self.num_accepted_per_position
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": [positions[i] for i in sorted(positions)],
        }


class Speculation:
    """Lets decode rows guess, with what all others have left of a step.

    Args:
        kv: block tables, in which guesses need room.
        proposer: None: an `NgramProposer`.
        can_guess: whether a runner can compute these rows with guesses; None: it always can.
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
        """Rows with guesses of which nothing is known yet."""

    def extend(self, plan: StepPlan, budget: int) -> None:
        """Add guesses to the rows of a plan, within budget and free memory.

        Nobody is preempted for a guess. None is made in a step that has preempted somebody, or that
        computes a prompt or many rows: there is no idle arithmetic in those.
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
            longest = request.max_num_tokens - request.num_tokens - 1  # and a token behind them
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
        """Wrong guesses were computed in vain, and what was launched meanwhile began sooner. Done
        before tokens are appended, so that nobody takes the KV of guesses for theirs."""
        for row in plan.rows:
            request = row.request
            if row.is_padding or request.is_finished or not row.samples:
                continue
            num_guesses = len(draft_token_ids(row))
            # Sooner by what was wrong in the step before, which was not known when it was planned.
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
        """Note what has become of guesses."""
        for row in self._guessing:
            if row.num_accepted is not None:
                self._luck.setdefault(row.request, Luck()).note(row.num_accepted > 0)
        self._guessing = [
            row for row in self._guessing if row.num_accepted is None and row.request.num_in_flight
        ]
