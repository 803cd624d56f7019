"""What the schedulers of all milestones share: requests come, get tokens, and go.

A milestone's scheduler is a file of its own that says which requests run (`schedule`) and where KV
lives (`free_memory`, `reset_memory`, `kv_usage`). Nothing here decides anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from .config import EngineConfig
from .kv import KVEvent, KVUsage
from .outputs import RequestOutput
from .plan import StepPlan
from .request import Request, RequestStatus, SampledToken
from .request_queue import RequestQueue


class BaseScheduler(ABC):
    """Decides what each step computes. Knows requests and token counts, no tensors."""

    def __init__(self, max_model_len: int, policy: str = "fcfs") -> None:
        self.max_model_len = max_model_len
        self.waiting = RequestQueue(policy)
        self.running: list[Request] = []
        self.events: list[KVEvent] = []
        """What happened to KV memory since the engine last asked, in order."""

    # -- what a milestone decides ------------------------------------------------------------

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Plan the next step."""

    @abstractmethod
    def validate(self, request: Request) -> None:
        """Refuse a request that no step could ever compute.

        Raises:
            ValueError: the message states the number and the limit.
        """

    @abstractmethod
    def free_memory(self, request: Request) -> None:
        """Give back what KV memory a request has, if any. It runs no more."""

    @abstractmethod
    def reset_memory(self) -> None:
        """Give back all KV memory, whatever state it is in."""

    @abstractmethod
    def kv_usage(self) -> KVUsage:
        """How full KV memory is."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Assert that no KV memory is lost and that it belongs to the right requests."""

    def stats(self) -> dict[str, Any]:
        """Figures of this milestone for `LLMEngine.stats`."""
        return {}

    # -- requests come and go ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request where the policy wants it."""
        for completion in request.completions:
            completion.max_num_tokens = min(completion.max_num_tokens, self.max_model_len)
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is."""
        self._end(request, "abort")

    def has_unfinished_requests(self) -> bool:
        """Whether a further step has something to compute."""
        return bool(self.waiting or self.running)

    # -- a step ------------------------------------------------------------------------------

    def mark_launched(self, plan: StepPlan) -> None:
        """Count a launched step as computed: its tokens are on their way."""
        for row in plan.rows:
            if row.is_padding:
                continue
            row.request.num_computed_tokens = row.end
            for request in row.sampling_requests:
                request.num_computed_tokens = row.end
                request.num_in_flight += 1
        plan.is_launched = True

    def update(self, plan: StepPlan, sampled: dict[str, SampledToken]) -> list[RequestOutput]:
        """Take in the results of a step: append tokens, finish some requests.

        Args:
            plan: the executed plan. A row whose request has finished meanwhile was computed in
                vain: it becomes padding.
            sampled: one token for each request that samples, by id.

        Returns:
            Outputs of the requests that got a token.
        """
        if not plan.is_launched:
            self.mark_launched(plan)
        changed: dict[str, Request] = {}
        for row in plan.rows:
            if row.request.is_finished and not row.is_padding:
                row.is_padding = True
                plan.num_padding_tokens += row.num_new_tokens
            if row.prompt_logprobs:
                row.request.take_prompt_logprobs(row.prompt_logprobs)
            for request in row.sampling_requests:
                if request.is_finished:
                    continue
                status = request.status
                request.append_token(sampled[request.request_id])
                leader = request.leader or request
                changed[leader.request_id] = leader
                if request.is_finished:
                    self._leave(request, status)
        return [RequestOutput.from_request(request) for request in changed.values()]

    def fail(self, plan: StepPlan) -> list[RequestOutput]:
        """End the requests of a step whose forward raised. All others are computed again.

        Nothing that is in the KV cache can be trusted then, so all of it is given back.
        """
        failed = dict.fromkeys(
            request
            for row in plan.rows
            for request in (row.request, *row.request.forks, *row.sampling_requests)
            if not request.is_finished
        )
        for request in failed:
            request.finish("error")
        self.restart([*self.running, *self.waiting])
        leaders = {(request.leader or request).request_id: request for request in failed}
        return [RequestOutput.from_request(request) for request in leaders.values()]

    def restart(self, requests: Iterable[Request]) -> None:
        """Begin anew with these requests: all wait, and no KV memory is in use.

        For use after an exception anywhere. Requests keep the tokens that they have.
        """
        requests = list(requests)
        self.running = []
        self.waiting.clear()
        self.reset_memory()
        for request in requests:
            request.restart()
        for request in requests:
            leader = request.leader or request
            if request.is_finished:
                continue
            is_to_fork = request is not leader and not (
                leader.is_finished or leader.num_output_tokens or request.num_output_tokens
            )
            if is_to_fork and request not in leader.forks:
                leader.forks.append(request)
            elif not is_to_fork:
                if request in leader.forks:
                    leader.forks.remove(request)
                self.waiting.add(request)

    def _end(self, request: Request, reason: str) -> None:
        status = request.status
        request.finish(reason)
        self._leave(request, status)

    def _leave(self, request: Request, status: RequestStatus) -> None:
        """Take a finished request out of its queue, and free its memory."""
        leader = request.leader or request
        if status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in leader.forks:
            leader.forks.remove(request)
        else:
            self.waiting.remove(request)
        self.free_memory(request)

    def drain_events(self, count: int | None = None) -> list[KVEvent]:
        """What happened to KV memory since the last call, in order; or the first `count` of it."""
        events = self.events[:count]
        del self.events[:count]  # the KV manager writes into this very list
        return events


def check_prompt_fits_step(request: Request, config: EngineConfig) -> None:
    """For schedulers that compute a prompt whole.

    Raises:
        ValueError: the prompt is larger than a step.
    """
    if request.num_prompt_tokens > config.max_num_batched_tokens:
        raise ValueError(
            f"the prompt has {request.num_prompt_tokens} tokens, but a step computes at most "
            f"max_num_batched_tokens={config.max_num_batched_tokens}"
        )


def check_one_completion(request: Request) -> None:
    """For schedulers whose requests cannot share KV.

    Raises:
        ValueError: several completions of the prompt are wanted.
    """
    n = request.sampling_params.n
    if n > 1:
        raise ValueError(
            f"n={n}: completions of a prompt share its KV from m3_paged on; here, add the prompt "
            f"{n} times"
        )


def check_completions_fit(request: Request, config: EngineConfig) -> None:
    """Completions of a prompt fork from it all at once.

    Raises:
        ValueError: they are more than may run.
    """
    if request.sampling_params.n > config.max_num_seqs:
        raise ValueError(
            f"n={request.sampling_params.n} completions start together, but "
            f"max_num_seqs={config.max_num_seqs}"
        )
