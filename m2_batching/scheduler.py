"""Iteration-level scheduling (Orca, OSDI '22, section 3.1): who runs is decided at every step.

A step first gives each running request its next token, then admits waiting ones while slots, rows
and the token budget last. A request that finishes leaves in the same step; the next step gives its
place to somebody else. Prefill and decode rows share a step.
"""

from __future__ import annotations

from typing import Any

from m1_single.scheduler import Scheduler as StaticScheduler
from milestone_llm.engine.plan import ScheduledRequest, StepPlan
from milestone_llm.engine.request import Request, RequestStatus
from milestone_llm.engine.request_queue import RequestQueue
from milestone_llm.trace.tracer import KVEvent, KVUsage

from .config import EngineConfig
from .slot_manager import SlotManager


class Scheduler(StaticScheduler):
    """Replaces `schedule` of static batching, and where a request's KV lives."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.waiting: RequestQueue = RequestQueue(config.policy)  # type: ignore[assignment]
        self.kv: Any = self.build_kv_manager()

    def build_kv_manager(self) -> Any:
        """Who owns which KV memory: a slot for each request that may run."""
        return SlotManager(self.config.max_num_seqs)

    def add(self, request: Request) -> None:
        """Queue a new request where the policy wants it."""
        self.waiting.add(request)

    def schedule(self) -> StepPlan:
        """Plan the next step: running requests first, then waiting ones in queue order."""
        plan = StepPlan()
        plan.rows += [self._row(request) for request in self.running]
        self._admit(plan, budget=self.config.max_num_batched_tokens - len(plan.rows))
        return plan

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Admit from the head of the queue. The first that does not fit stops it: no overtaking."""
        while self.waiting and self.reason_to_wait(self.waiting.peek(), budget) is None:
            row = self._start(self.waiting.pop(), plan)
            budget -= self._add_row(plan, row, budget)

    def _start(self, request: Request, plan: StepPlan) -> ScheduledRequest:
        """Give a waiting request its KV memory and its first row."""
        self._allocate(request, plan)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        plan.admitted.append(request)
        return self._row(request)

    def _allocate(self, request: Request, plan: StepPlan) -> None:
        """KV memory for all tokens that are known."""
        self.kv.allocate(request.request_id, request.num_tokens)

    def _add_row(self, plan: StepPlan, row: ScheduledRequest, budget: int) -> int:
        """Put a row into the plan. Returns the tokens that it takes of the step's budget."""
        plan.rows.append(row)
        return row.num_new_tokens

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request cannot join a step that has `budget` tokens left; None if it can."""
        if len(self.running) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs} requests are running"
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        if num_new_tokens > budget:
            return f"it needs {num_new_tokens} tokens, the step has {budget} left"
        if not self.kv.can_allocate(request.num_tokens):
            return f"no KV memory: {self.kv.describe(request.num_tokens)}"
        return None

    def _row(self, request: Request) -> ScheduledRequest:
        """All known tokens of a request whose KV is not there yet: its prompt, or the last one."""
        start = request.num_computed_tokens
        blocks = self.kv.blocks_of(request.request_id)
        return ScheduledRequest(request, start, request.num_tokens - start, blocks=blocks)

    def _release(self, finished: list[Request]) -> None:
        """Free the KV memory of requests that are done: the next step may use it."""
        for request in finished:
            if request.request_id in self.kv.owners:
                self.kv.free(request.request_id)
                self.running.remove(request)

    # -- what the tracer asks ----------------------------------------------------------------

    def drain_events(self) -> list[KVEvent]:
        """KV memory handed out and returned since the last call."""
        events, self.kv.events = self.kv.events, []
        return events

    def kv_usage(self) -> KVUsage:
        """KV memory in slots: each reserves `max_model_len` tokens, however few are stored."""
        num_used = len(self.kv.owners)
        return KVUsage(
            unit="slot",
            total=self.kv.num_slots,
            used=num_used,
            watermark=self.kv.watermark,
            reserved_tokens=num_used * self.max_model_len,
            stored_tokens=sum(request.num_computed_tokens for request in self.running),
        )

    def check_invariants(self) -> None:
        """Assert that no KV memory is lost and that it belongs to the running requests."""
        self.kv.check_invariants()
        running = {request.request_id for request in self.running}
        assert running == set(self.kv.owners), "KV memory belongs to the running requests"
        assert len(self.running) <= self.config.max_num_seqs
