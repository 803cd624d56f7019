"""The core of an engine on several ranks: all of them are asked for the same, and plan the same.

Rank 0's core is asked for requests. The others learn of them before the next step, from rank 0, and
make the same requests: equal ids, numbers and seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from milestone_llm.core.engine_core import ModelRunner
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.guarded_core import GuardedCore
from milestone_llm.frontend.input_processor import build_requests
from milestone_llm.frontend.watching import StepWatcher

from .ranks import Ranks


class NewRequest(NamedTuple):
    """A request that a core was asked for: all that another rank needs to make the same."""

    request_ids: tuple[str, ...]
    """Of each completion."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int
    priority: float
    seed: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> NewRequest:
        """What makes the completions of a prompt what they are."""
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
    """A completion that a core was told to end."""

    request_id: str
    reason: str


class RankedCore(GuardedCore):
    """A core whose ranks agree before each step on what came since the step before.

    Args:
        ranks: the processes.
        number: which of their engines this is.
    """

    def __init__(
        self,
        ranks: Ranks,
        number: int,
        milestone: str,
        scheduler: BaseScheduler,
        runner: ModelRunner,
        tracer: StepWatcher | None,
        *,
        check_invariants: bool,
        can_run_ahead: Callable[[StepPlan], bool] | None,
    ) -> None:
        super().__init__(
            milestone,
            scheduler,
            runner,
            tracer,
            check_invariants=check_invariants,
            can_run_ahead=can_run_ahead,
        )
        self.ranks, self.number = ranks, number
        self._changes: list[NewRequest | FinishedRequest] = []
        self._followed: dict[str, Request] = {}
        """Requests that came from rank 0, by completion."""

    def add_request(self, *requests: Request) -> None:
        """Queue a request, here and with the next step elsewhere."""
        super().add_request(*requests)
        self._changes.append(NewRequest.of(requests))

    def finish_request(self, request: Request, reason: str) -> None:
        """End a request, here and with the next step elsewhere."""
        super().finish_request(request, reason)
        self._changes.append(FinishedRequest(request.request_id, reason))

    def step(self) -> list[EngineCoreOutput]:
        """Agree on what has changed, then step."""
        self.agree("step")
        return super().step()

    def agree(self, call: str) -> None:
        """Before a `call` of all ranks: what came to rank 0 and not to this one comes to it now.

        Raises:
            RuntimeError: this rank was asked for something else.
        """
        own = self._changes
        theirs = self.ranks.exchange(call, self.number, own)
        if own and own != theirs:
            pairs = itertools.zip_longest(own, theirs)
            mine, of_rank_0 = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(
                f"rank {self.ranks.rank} was asked for {mine} where rank 0 was asked for "
                f"{of_rank_0}: make the same calls on all ranks, or only on rank 0"
            )
        if not own:
            for change in theirs:
                self._follow(change)
        self._changes = []
        self._followed = {k: each for k, each in self._followed.items() if not each.is_finished}

    def restart(self, requests: Iterable[Request]) -> None:
        """Begin anew on this rank. The ranks no longer know the same, so the others end."""
        self.ranks.part()
        super().restart(requests)

    def _follow(self, change: NewRequest | FinishedRequest) -> None:
        if isinstance(change, NewRequest):
            requests = build_requests(*change)
            self._followed |= {each.request_id: each for each in requests}
            super().add_request(*requests)
        elif followed := self._followed.get(change.request_id):
            super().finish_request(followed, change.reason)
