"""M3's runner: moves blocks as the plan says, then runs M2's flat forward with paged attention."""

from __future__ import annotations

import torch

from m2_batching.runner import ModelRunner as FlatModelRunner
from milestone_llm.engine.plan import ScheduledRequest, StepPlan
from milestone_llm.engine.request import SampledToken

from . import attention
from .block_cache import BlockCache
from .scheduler import PagedStepPlan


class ModelRunner(FlatModelRunner):
    """Turns a `PagedStepPlan` into sampled tokens."""

    attention_name = attention.NAME
    cache: BlockCache

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> dict[str, SampledToken]:
        """Swap and copy blocks, then compute the step."""
        assert isinstance(plan, PagedStepPlan)
        self.cache.swap_out(plan.swap_outs)
        self.cache.swap_in(plan.swap_ins)
        self.cache.copy(plan.copies)
        return super().execute(plan)

    def attention_metadata(self, rows: list[ScheduledRequest]) -> attention.AttentionMetadata:
        """Slots, block tables and lengths of this step."""
        return attention.AttentionMetadata.build(rows, self.cache)
