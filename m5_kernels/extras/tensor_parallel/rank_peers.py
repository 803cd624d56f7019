"""The ranks of an engine agree before each step: with the same requests, they plan the same step.

Requests come to rank 0's engine. Before the next step rank 0 sends them to the other ranks, which
make the same requests, with equal ids, numbers and seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from milestone_llm.core.engine_core import EngineCore
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.engine_driver import Peers
from milestone_llm.frontend.input_processor import build_requests
from milestone_llm.structured.grammars import Grammars

from .ranks import Ranks


class NewRequest(NamedTuple):
    """A request that an engine was given: all that another rank needs to make the same one."""

    request_ids: tuple[str, ...]
    """The id of each completion."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int
    priority: float
    seed: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> NewRequest:
        """Describe the completions of a prompt."""
        request = requests[0]
        return cls(
            tuple(each.request_id for each in requests),
            tuple(request.prompt_token_ids),
            request.sampling_params,
            request.arrival,
            request.priority,
            request.seed,
            request.eos_token_ids,
        )


class FinishedRequest(NamedTuple):
    """A completion that an engine was told to end."""

    request_id: str
    reason: str


class RankPeers(Peers):
    """The engines of the other ranks, for the driver of this one.

    Args:
        ranks: the processes.
        number: the number of this engine, the same on all ranks.
        grammars: makes the grammar of a request that came from rank 0.
    """

    def __init__(self, ranks: Ranks, number: int, grammars: Grammars) -> None:
        self.ranks, self.number, self.grammars = ranks, number, grammars
        self._changes: list[Sequence[Request] | FinishedRequest] = []
        """Completions of a prompt that were queued, and completions that ended, since a call."""
        self._followed: dict[str, Request] = {}
        """Requests that came from rank 0, by id of the completion."""

    def added(self, requests: Sequence[Request]) -> None:
        """Note completions that were queued here. Other ranks get them before the next step."""
        self._changes.append(requests)

    def finished(self, request: Request, reason: str) -> None:
        """Note that a completion was ended here. Other ranks end it before the next step."""
        self._changes.append(FinishedRequest(request.request_id, reason))

    def before(self, call: str, core: EngineCore) -> None:
        """Prepare a `call` of all ranks: take over what came to rank 0 and not to this rank.

        Raises:
            RuntimeError: this rank was asked for something else.
        """
        theirs = self.ranks.exchange(call, self.number, self._described_changes())
        self._take_priorities(theirs, core)
        own = self._described_changes()
        if own and own != theirs:
            pairs = itertools.zip_longest(own, theirs)
            mine, of_rank_0 = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(
                f"rank {self.ranks.rank} was asked for {mine} where rank 0 was asked for "
                f"{of_rank_0}: make the same calls on all ranks, or only on rank 0"
            )
        if not own:
            for change in theirs:
                self._follow(change, core)
        self._changes = []
        self._followed = {k: each for k, each in self._followed.items() if not each.is_finished}

    def in_step(self, core: EngineCore, step: Callable[[], None]) -> Callable[[], None]:
        """Return a step before which this rank takes over what came to rank 0."""

        def step_together() -> None:
            self.before("step", core)
            step()

        return step_together

    def parted(self) -> None:
        """Tell the other ranks to end: this rank was interrupted, and the ranks no longer agree."""
        self.ranks.mark_out_of_sync()

    def _described_changes(self) -> list[NewRequest | FinishedRequest]:
        return [
            change if isinstance(change, FinishedRequest) else NewRequest.of(change)
            for change in self._changes
        ]

    def _take_priorities(
        self, theirs: Sequence[NewRequest | FinishedRequest], core: EngineCore
    ) -> None:
        """Give this rank's requests rank 0's priorities: each rank ages them by its own clock."""
        priorities = {
            request_id: change.priority
            for change in theirs
            if isinstance(change, NewRequest)
            for request_id in change.request_ids
        }
        waiting = core.scheduler.waiting
        for change in self._changes:
            if isinstance(change, FinishedRequest):
                continue
            for request in change:
                is_queued = request in waiting  # a queue that is ordered by priority
                if is_queued:
                    waiting.remove(request)
                request.priority = priorities.get(request.request_id, request.priority)
                if is_queued:
                    waiting.add(request)

    def _follow(self, change: NewRequest | FinishedRequest, core: EngineCore) -> None:
        if isinstance(change, NewRequest):
            requests = build_requests(*change, self.grammars)
            self._followed |= {each.request_id: each for each in requests}
            core.add_request(*requests)
        elif followed := self._followed.get(change.request_id):
            core.finish_request(followed, change.reason)
