"""M3, written by you: scheduling when memory is given out block by block.

A request is admitted when the blocks for its known tokens are free, and grows as it generates. When
a running request needs a block and none is free, the most recently admitted one is preempted
(PagedAttention, SOSP '23, section 4.5).

Begin with block_pool.py and block_manager.py; this file is steps 6 to 9. What is new beside M2:

- `self.kv` is your `BlockManager`.
- `self.preempter` (m3_paged/preemption.py): `preempt(victim, plan, reason)` takes a request's
  blocks and notes it in the plan; `swap_in(request, plan)` brings back what was swapped out. The
  lists `self.running` and `self.waiting` are yours: it does not touch them.
- A preempted request has `num_preemptions` above 0, and the status SWAPPED if its KV is in host
  memory. When it is admitted again, it goes into `plan.resumed` instead of `plan.admitted`.
- `plan.copies` are the blocks that must be copied before the step.
- Further completions of a prompt (n > 1) wait in `self.completions` (m3_paged/completions.py) until
  the first has computed it. Then `_add_row` starts them, as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from exercises.build.m3.block_manager import BlockManager
from exercises.build.m3.block_pool import BlockPool
from m3_paged.completions import Completions
from m3_paged.config import EngineConfig
from m3_paged.kv_usage import check_tables, kv_stats, paged_kv_usage
from m3_paged.preemption import Preempter
from milestone_llm.core.kv import KVUsage
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler


class Scheduler(BaseScheduler):
    """Running requests first, each with the block it needs; then waiting ones if memory is left."""

    def __init__(self, config: EngineConfig, max_model_len: int, num_blocks: int) -> None:
        config.check_holds_one_request(max_model_len, num_blocks)
        super().__init__(max_model_len, config.policy)
        self.config = config
        self.num_blocks = num_blocks
        self.num_host_blocks = config.num_host_blocks(num_blocks)
        self.kv = BlockManager(BlockPool(num_blocks), config.block_size, self.events)
        self.preempter = Preempter(self.kv, self.num_host_blocks)
        self.completions = Completions()

    def validate(self, request: Request) -> None:
        """Refuse a prompt that is larger than a step, and completions that could not all run."""
        self.config.check_prompt_fits_step(request.num_prompt_tokens)
        self.config.check_completions(request.sampling_params.n)

    # -- a step: yours -----------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step.

        Running requests in the order of `by_seniority`, each if `_make_room` finds its blocks; then
        waiting ones in the order of the queue, unless somebody was preempted.
        """
        raise NotImplementedError(
            "step 6: as in M2, but each running request asks `_make_room` before it gets its row. "
            "Step 7: a victim may not have had its turn; and nobody is admitted after a preemption."
        )

    def by_seniority(self) -> list[Request]:
        """Running requests in the order in which a step serves them; the last is the victim.

        A list of its own: `self.running` changes while a step is planned.
        """
        raise NotImplementedError(
            "step 6: by admission, which is the order of self.running. Step 8: under "
            'policy="priority" sorted by self.waiting.key.'
        )

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Get the blocks for a running request's next token, preempting as long as it takes.

        Returns:
            False if the request had to go itself.
        """
        raise NotImplementedError(
            "step 6: self.kv.append for tokens num_computed_tokens .. num_tokens - 1; what it "
            "returns belongs into plan.copies. Step 7: as long as can_append says no, the last of "
            "by_seniority goes, with a reason for people: out of running, into waiting."
        )

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request and its completions cannot join a step that has `budget` tokens left.

        Those of running requests take a row each, as soon as their prompt is computed.
        """
        num_running = len(self.running) + self.completions.num_of(self.running)
        if num_running + self.completions.num_of([request]) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs}, running: {num_running}"
        raise NotImplementedError(
            "step 6: the budget, as in M2, and memory: can the blocks for all known tokens be "
            "allocated? self.kv.describe says in words what is lacking."
        )

    def _admit(self, request: Request, plan: StepPlan) -> None:
        """Give a new or preempted request blocks for all its tokens, and a row."""
        raise NotImplementedError(
            "step 6: as in M2; the row comes from `_add_row`. Step 8: what was preempted is "
            "resumed, and what was swapped out is swapped in, before the status changes."
        )

    def free_memory(self, request: Request) -> None:
        """Give back a request's blocks, on the device or in host memory (`self.preempter.host`)."""
        raise NotImplementedError(
            "step 6: if it has a block table, self.kv.free drops it. Step 8: host memory is a "
            "BlockManager, too; a swapped request that is aborted has a table there."
        )

    # -- completions of a prompt, as they are -------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Queue requests; further completions of a prompt start when the first has computed it."""
        super().add(*requests)
        for fork in self.completions.hold_back(requests):
            self.waiting.remove(fork)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in whatever state it is."""
        if self.completions.discard(request):
            request.finish(reason)
        else:
            super().finish(request, reason)

    def restart(self, requests: Iterable[Request]) -> None:
        """After an exception anywhere: all wait with the tokens they have. All KV is dropped."""
        super().restart(dict.fromkeys([*requests, *self.completions.take_all()]))

    # -- rows, figures and checks, as they are -----------------------------------------------

    def _add_row(self, request: Request, plan: StepPlan) -> None:
        """All known tokens of a request whose KV is not there yet: its prompt, or the last one."""
        row = ScheduledRequest(
            request,
            start=request.num_computed_tokens,
            num_new_tokens=request.num_uncomputed_tokens,
            blocks=self.kv.block_tables[request.request_id],
        )
        plan.rows.append(row)
        # The prompt is complete with this step: its further completions start from its KV.
        for fork in self.completions.start(request):
            self.kv.fork(request.request_id, fork.request_id)
            fork.become(RequestStatus.RUNNING)
            self.running.append(fork)
            plan.admitted.append(fork)
            row.sampling_requests.append(fork)

    def reset_memory(self) -> None:
        """Give back all blocks."""
        self.kv.reset()
        self.preempter.reset()

    def num_used_units(self) -> int:
        """Blocks that requests own."""
        return self.kv.pool.num_used

    def kv_usage(self) -> KVUsage:
        """KV memory in blocks. Waste is at most one partly filled block a request."""
        return paged_kv_usage(self.kv, self.running, self.watermark)

    def stats(self) -> dict[str, Any]:
        """Preemptions, copies, and places that are reserved but empty."""
        return kv_stats(self.kv, self.preempter, self.running)

    def check_invariants(self) -> None:
        """Assert that no block is lost and that tables belong to running or swapped requests."""
        check_tables(self.kv, self.preempter, self.running, self.waiting)
        assert len(self.running) <= self.config.max_num_seqs
