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

from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from m3_paged.block_manager import BlockManager
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request

from .config import EngineConfig
from .ngram import NgramProposer

MAX_REST = 32


class Proposer(Protocol):
    """Guesses tokens: `NgramProposer`, or whatever else. Bad guesses cost time, nothing more."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that may come behind the known ones."""


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


class Speculation:
    """Lets decode rows guess, with what all others have left of a step.

    Args:
        kv: block tables, in which guesses need room.
        proposer: None: an `NgramProposer`.
    """

    def __init__(
        self, config: EngineConfig, kv: BlockManager, proposer: Proposer | None = None
    ) -> None:
        self.kv = kv
        self.proposer = proposer or NgramProposer()
        self.num_tokens = config.num_speculative_tokens
        self.max_rows = config.num_rows_that_guess
        self._luck = WeakKeyDictionary[Request, Luck]()  # forgotten with their requests
        self._guessing: list[ScheduledRequest] = []
        """Rows with guesses of which nothing is known yet."""

    def extend(self, plan: StepPlan, budget: int) -> None:
        """Add guesses to the rows of a plan, within budget and free memory.

        Nobody is preempted for a guess. None is made in a step that has preempted somebody, or that
        computes a prompt or many rows: there is no idle arithmetic in those.
        """
        self._learn()
        if plan.preempted or len(plan.rows) > self.max_rows:
            return
        is_idle = all(row.phase == "decode" and row.samples for row in plan.rows)
        if not (is_idle and plan.can_run_ahead):
            return
        for row in plan.rows:
            request, luck = row.request, self._luck.setdefault(row.request, Luck())
            longest = request.max_num_tokens - request.num_tokens - 1  # and a token behind them
            most = min(self.num_tokens, longest, budget)
            luck.rest -= 1
            if most <= 0 or luck.rest >= 0:
                continue
            guesses = self.proposer.propose(request, most)
            end = row.end + len(guesses)
            if guesses and self.kv.can_append(request.request_id, row.start, end):
                plan.copies += self.kv.append(request.request_id, row.start, end)
                row.draft_token_ids = guesses
                row.num_new_tokens += len(guesses)
                self._guessing.append(row)
                budget -= len(guesses)

    def _learn(self) -> None:
        """Note what has become of guesses."""
        for row in self._guessing:
            if row.num_accepted is not None:
                self._luck.setdefault(row.request, Luck()).note(row.num_accepted > 0)
        self._guessing = [
            row for row in self._guessing if row.num_accepted is None and row.request.num_in_flight
        ]
