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
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request

MAX_REST = 64


class Proposer(Protocol):
    """Guesses tokens: `NgramProposer`, or whatever else. Bad guesses cost time, nothing more."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that may come behind the known ones."""


@dataclass
class Luck:
    """How a request's guesses have fared: each miss in a row doubles the rest that follows."""

    position: int = -1
    guess: int = -1
    """The first guess of the last row with guesses, and where it would stand."""
    num_misses: int = 0
    rest: int = 0
    """Steps without guesses that are left."""

    def may_guess(self, token_ids: list[int]) -> bool:
        """Whether to guess in this step, now that these tokens are known."""
        if 0 <= self.position < len(token_ids):
            self.num_misses += 1
            if token_ids[self.position] == self.guess:
                self.num_misses = 0
            self.rest = min(2**self.num_misses, MAX_REST)
            self.position = -1
        self.rest -= 1
        return self.rest <= 0


class Speculation:
    """Lets rows guess with what a step has left when every running request has its next token.

    Args:
        kv: block tables, in which guesses need room.
        num_tokens: most guesses of a row.
    """

    def __init__(self, kv: BlockManager, proposer: Proposer, num_tokens: int) -> None:
        self.kv = kv
        self.proposer = proposer
        self.num_tokens = num_tokens
        self._luck = WeakKeyDictionary[Request, Luck]()  # forgotten with their requests

    def extend(self, plan: StepPlan, budget: int) -> int:
        """Add guesses to decode rows, within budget and memory. Returns the budget left.

        Nobody is preempted for a guess, and none is made in a step that has preempted somebody.
        """
        if plan.preempted:
            return budget
        for row in plan.rows:
            request, luck = row.request, self._luck.setdefault(row.request, Luck())
            longest = request.max_num_tokens - request.num_tokens - 1  # and a token behind them
            most = min(self.num_tokens, longest, budget)
            if most <= 0 or request.num_in_flight or not luck.may_guess(request.token_ids):
                continue
            guesses = self.proposer.propose(request, most)
            end = row.end + len(guesses)
            if guesses and self.kv.can_append(request.request_id, row.start, end):
                plan.copies += self.kv.append(request.request_id, row.start, end)
                luck.position, luck.guess = row.end, guesses[0]
                row.draft_token_ids = guesses
                row.num_new_tokens += len(guesses)
                budget -= len(guesses)
        return budget
