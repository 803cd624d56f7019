"""The base of all milestones' schedulers: requests come, get tokens, and go.

A milestone's scheduler is a file of its own. It decides which requests run (`schedule`); its KV
manager knows where their KV lives. Nothing here decides anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from .completions import Completions
from .kv import KVCacheManager, KVEvent, KVUsage
from .outputs import EngineCoreOutput, SampledToken
from .plan import StepPlan
from .request import Request, RequestStatus
from .request_queue import RequestQueue


class BaseScheduler(ABC):
    """Decides what each step computes. Knows requests and counts of tokens, no tensors.

    Args:
        kv: the KV memory from which requests get theirs.
    """

    def __init__(self, kv: KVCacheManager, max_model_len: int, policy: str = "fcfs") -> None:
        self.kv = kv
        self.max_model_len = max_model_len
        self.waiting = RequestQueue(policy)
        self.completions = Completions()
        self.running: list[Request] = []
        self.watermark = 0
        """High-water mark: most units of KV memory that a step has used. Reset it to 0 to start a
        new measurement."""

    def __repr__(self) -> str:
        names = [each.request_id for each in self.running]
        return f"<{type(self).__module__}: running {names}, waiting {self.waiting}>"

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Plan the next step."""

    @abstractmethod
    def validate(self, request: Request) -> None:
        """Raise `InputError` for a request that no step could ever compute."""

    def kv_usage(self) -> KVUsage:
        """Return how full KV memory is."""
        return self.kv.usage(self.running, self.watermark)

    def check_invariants(self) -> None:
        """Assert that no KV memory is lost and that it belongs to the right requests."""
        self.kv.check(self.running, self.waiting)

    def stats(self) -> dict[str, Any]:
        """Return this milestone's figures for `LLMEngine.stats`."""
        return self.kv.stats(self.running)

    def add(self, *requests: Request) -> None:
        """Queue requests where the policy wants them. They may grow to `max_model_len` tokens.

        Further completions of a prompt start when the first has computed it.
        """
        held_back = self.completions.hold_back(requests)
        for request in requests:
            request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
            if request not in held_back:
                self.waiting.add(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state."""
        status = request.status
        request.finish(reason)
        if not self.completions.discard(request):
            self._leave(request, status)

    @property
    def num_queued(self) -> int:
        """Requests that wait or run, completions that have not started included."""
        return len(self.waiting) + len(self.running) + len(self.completions)

    def has_unfinished_requests(self) -> bool:
        """Whether a further step has something to compute."""
        return bool(self.waiting or self.running)

    def mark_launched(self, plan: StepPlan) -> None:
        """Count a launched step as computed: its tokens are on their way."""
        for row in plan.rows:
            if row.is_padding:
                continue
            row.request.num_computed_tokens += row.num_new_tokens
            for request in row.sampling_requests:
                request.num_computed_tokens = row.request.num_computed_tokens
                request.num_in_flight += row.num_sampled_tokens
        plan.is_launched = True
        self.watermark = max(self.watermark, self.kv.num_used)

    def update(
        self, plan: StepPlan, sampled: dict[str, list[SampledToken]]
    ) -> list[EngineCoreOutput]:
        """Take in the results of a step: append tokens, finish some requests.

        A row whose request has finished meanwhile was wasted work: it becomes padding.

        Args:
            sampled: for each request that samples, by id, its tokens in order.

        Returns:
            An output for each request that got a token.
        """
        if not plan.is_launched:
            self.mark_launched(plan)
        outputs = []
        for row in plan.rows:
            if row.request.is_finished and not row.is_padding:
                row.is_padding = True
                plan.num_padding_tokens += row.num_new_tokens
            for request in row.sampling_requests:
                if not request.is_finished:
                    outputs.append(self._append(request, sampled[request.request_id]))
        return outputs

    def _append(self, request: Request, sampled: list[SampledToken]) -> EngineCoreOutput:
        """Give a request its tokens; the request leaves with its last one."""
        status = request.status
        num_before = len(request.token_ids) - request.num_prompt_tokens
        for token in sampled:
            request.append_token(token)
            if request.finish_reason is not None:
                self._leave(request, status)
                break
        return request.output_since(num_before)  # no tokens where there was none to choose

    def fail(self, plan: StepPlan) -> None:
        """End the requests of a step whose forward raised. All other requests restart: no KV can
        be trusted then."""
        for row in plan.rows:
            further = self.completions.start(row.request)  # they wait for KV that is not there
            for request in (row.request, *row.sampling_requests, *further):
                if not request.is_finished:
                    request.finish("error")
        self.restart([*self.running, *self.waiting])

    def restart(self, requests: Iterable[Request]) -> None:
        """Queue all requests again with the tokens that they have, after an exception anywhere. All
        KV is dropped."""
        requests = list(dict.fromkeys([*requests, *self.completions.take_all()]))
        self.running = []
        self.waiting.clear()
        self.kv.reset()
        for request in requests:
            request.restart()
        self.add(*(request for request in requests if not request.is_finished))

    def _leave(self, request: Request, status: RequestStatus) -> None:
        """Take a finished request out of its queue, and free its memory."""
        if status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.kv.free(request)

    def drain_events(self) -> list[KVEvent]:
        """Return what happened to KV memory since the last call, in order."""
        events, self.kv.events[:] = self.kv.events[:], []  # all parts of the manager share the list
        return events
