"""M2, written by you: iteration-level scheduling (Orca, OSDI '22, section 3, S1).

A step first gives each running request its next token, then admits waiting ones while rows, the
token budget and regions last. A request that finishes leaves in the same step; the next step gives
its place to another request. Prefill and decode rows share a step.

    python -m exercises.build m2         what to write next, and what is wrong with it
    python -m exercises.build m2 3       step 3 alone

What you need to know of the rest, some five minutes:

- `Request` (milestone_llm/core/request.py): `num_computed_tokens` have their keys and values in the
  cache, `num_uncomputed_tokens` are known and have not: the whole prompt at first, later the token
  that was sampled last. You never change these two: the base class does, after the step.
- `StepPlan` and `ScheduledRequest` (milestone_llm/core/plan.py): a step, and a row of it.
- `self.waiting` is a `RequestQueue` (milestone_llm/core/request_queue.py): `peek`, `pop`, `add`; it
  is true while somebody waits. `self.running` is a list of requests.
- `self.kv` is a `RegionManager` (m2_batching/regions.py): `can_allocate`, `describe`, `allocate`,
  `free`, `reset`; `regions` has the region of each request that has one, by request id.
- `BaseScheduler` (milestone_llm/core/scheduler.py) takes requests in, hands sampled tokens to them,
  and takes finished ones out of `self.running`; then it calls `free_memory`.
"""

from __future__ import annotations

from m2_batching.config import EngineConfig
from m2_batching.regions import RegionManager
from milestone_llm.core.kv import KVUsage
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler


class Scheduler(BaseScheduler):
    """Running requests first, then waiting ones in the order of the queue."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        super().__init__(max_model_len, config.policy)
        self.config = config
        self.kv = RegionManager(config.max_num_seqs, self.events)

    def validate(self, request: Request) -> None:
        """Refuse a prompt that is larger than a step, and several completions of it."""
        self.config.check_prompt_fits_step(request.num_prompt_tokens)
        self.config.check_completions(request.sampling_params.n, can_share_kv=False)

    # -- a step: yours -----------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: rows of running requests, then of those that are admitted.

        A request that must wait is named in `plan.waiting_reasons`, with the reason.
        """
        raise NotImplementedError(
            "begin with an empty StepPlan(). Step 1: while somebody waits, take the next one out "
            "of the queue and admit it. Step 2 puts the running requests before that."
        )

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request cannot join a step; None if it can.

        Args:
            budget: tokens that the step has left.
        """
        raise NotImplementedError(
            "step 3: compare the number of running requests with self.config.max_num_seqs. The "
            "text is for people; it names the limit and its value. Nothing in the way: None."
        )

    def _admit(self, request: Request, plan: StepPlan) -> None:
        """Make a waiting request a running one: a region, a status, a place in the lists, a row."""
        raise NotImplementedError(
            "ask self.kv for a region; request.become(RequestStatus.RUNNING); the request "
            "belongs into self.running and plan.admitted, its row into plan.rows."
        )

    def _row(self, request: Request) -> ScheduledRequest:
        """All known tokens of a request whose KV is not there yet: its prompt, or the last one."""
        raise NotImplementedError(
            "a ScheduledRequest needs the request, where it goes on (start), how many tokens are "
            "new, and in `blocks` a list with the number of its region."
        )

    # -- KV memory: yours, too ---------------------------------------------------------------

    def free_memory(self, request: Request) -> None:
        """Give back a request's region, if it has one: the next step may use it."""
        raise NotImplementedError(
            "step 4: self.kv.free takes the id of a request. One that is aborted while it waits "
            "has no region."
        )

    def reset_memory(self) -> None:
        """Give back all regions, whoever has them."""
        raise NotImplementedError("step 6: the RegionManager has a method for it.")

    # -- figures and checks, as they are -----------------------------------------------------

    def num_used_units(self) -> int:
        """Regions that requests own."""
        return len(self.kv.regions)

    def kv_usage(self) -> KVUsage:
        """KV memory in regions: each reserves `max_model_len` tokens, however few are stored."""
        num_used = self.num_used_units()
        return KVUsage(
            unit="region",
            total=self.kv.num_regions,
            used=num_used,
            watermark=self.watermark,
            reserved_tokens=num_used * self.max_model_len,
            stored_tokens=sum(request.num_computed_tokens for request in self.running),
        )

    def check_invariants(self) -> None:
        """Assert that no region is lost and that they belong to the running requests."""
        self.kv.check_invariants()
        running = {request.request_id for request in self.running}
        assert running == set(self.kv.regions), "regions belong to the running requests"
        assert len(self.running) <= self.config.max_num_seqs
