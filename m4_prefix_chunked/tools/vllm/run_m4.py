"""M4's side of a comparison: its scheduler, or the one with vLLM's rules, with a made-up model."""

from __future__ import annotations

from collections import deque

from m4_prefix_chunked.config import EngineConfig
from m4_prefix_chunked.scheduler import Scheduler
from m4_prefix_chunked.speculation import draft_token_ids
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

from . import like_vllm
from .steps import Device, Row, Step
from .traffic import STOP_TOKEN_IDS, Arrival, Limits, guesses


class MadeUpProposer:
    """Guesses as the made-up model would continue, sometimes wrongly."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens that may come after the known ones."""
        return guesses(request.token_ids, request.index, num_tokens)


class M4Run:
    """M4's scheduler on some traffic, step by step.

    Args:
        rules: vLLM's rules to plan by; None: M4's own scheduler.
    """

    def __init__(self, limits: Limits, rules: frozenset[str] | None = None) -> None:
        config = EngineConfig(
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            policy=limits.policy,
            enable_prefix_caching=limits.enable_prefix_caching,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            speculation="ngram" if limits.num_speculative_tokens else None,
            num_speculative_tokens=max(1, limits.num_speculative_tokens),
        )
        config.check_holds_one_request(limits.max_model_len, limits.num_blocks)
        sizes = limits.max_model_len, limits.num_blocks
        self.scheduler: Scheduler | like_vllm.Scheduler
        if rules is None:
            self.scheduler = Scheduler(config, *sizes, MadeUpProposer())
        else:
            self.scheduler = like_vllm.Scheduler(config, *sizes, MadeUpProposer(), rules=rules)
        self.has_own_prompts = rules is not None
        """Whether each completion is a request of its own, as in vLLM."""
        self.num_ahead = int(limits.is_ahead)
        self.requests: dict[str, list[Request]] = {}
        """The completions of each request."""
        self.device = Device(limits.block_size)
        self.num_cached_tokens = 0
        self._num_arrivals = 0
        self._in_flight: deque[tuple[StepPlan, dict[str, list[int]]]] = deque()

    def add(self, arrival: Arrival) -> None:
        """Queue a request and its completions."""
        params = SamplingParams(
            max_tokens=arrival.max_tokens,
            ignore_eos=True,
            stop_token_ids=list(STOP_TOKEN_IDS),
            cache_salt=arrival.salt,
            prompt_logprobs=1 if arrival.has_prompt_logprobs else None,
            n=arrival.n,
        )
        own = []
        for index in range(arrival.n):
            name = f"{arrival.name}/{index}" if index else arrival.name
            self.device.add(name, arrival.tokens, index)
            own.append(
                Request(
                    name,
                    list(arrival.tokens),
                    params,
                    arrival=self._num_arrivals,
                    priority=arrival.priority,
                    index=index,
                )
            )
            self._num_arrivals += self.has_own_prompts
        self._num_arrivals += not self.has_own_prompts
        self.requests[arrival.name] = own
        if self.has_own_prompts:
            for request in own:
                self.scheduler.add(request)
        else:
            self.scheduler.add(*own)

    def abort(self, name: str) -> None:
        """End a request, if it is there and has not ended."""
        for request in reversed(self.requests.get(name, [])):
            if not request.is_finished:
                self.scheduler.finish(request, "abort")

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> Step:
        """Plan a step, compute it, and settle it, or the one before."""
        plan = self.scheduler.schedule()
        rows = [
            Row(
                row.request.request_id,
                row.start,
                row.end,
                list(row.blocks),
                list(draft_token_ids(row)),
            )
            for row in plan.rows
        ]
        step = Step(
            rows=rows,
            admitted=[request.request_id for request in plan.admitted],
            resumed=[request.request_id for request in plan.resumed],
            preempted=[each.request.request_id for each in plan.preempted],
            num_used=self.scheduler.kv.num_used,
        )
        self.num_cached_tokens += sum(row.num_cached_tokens for row in plan.rows)
        samples = {
            row.request.request_id: [each.request_id for each in row.sampling_requests]
            for row in plan.rows
        }
        sampled = self.device.run(rows, samples, plan.copies)
        for row in plan.rows:
            row.request.prompt_logprobs += [{} for _ in row.prompt_positions]
        self.scheduler.mark_launched(plan)
        if rows:
            self._in_flight.append((plan, sampled))
        while len(self._in_flight) > (self.num_ahead if rows else 0):
            step.finished += self._settle()
        step.running = [request.request_id for request in self.scheduler.running]
        step.waiting = [request.request_id for request in self.scheduler.waiting]
        return step

    def _settle(self) -> list[str]:
        """Hand the tokens of the oldest step to the requests. Returns those that ended."""
        plan, sampled = self._in_flight.popleft()
        here = {each for row in plan.rows for each in (row.request, *row.sampling_requests)}
        before = {request for request in here if not request.is_finished}
        tokens = {name: [SampledToken(one) for one in ids] for name, ids in sampled.items()}
        self.scheduler.update(plan, tokens)
        self.scheduler.drain_events()
        return [request.request_id for request in before if request.is_finished]
