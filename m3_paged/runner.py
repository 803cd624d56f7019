"""M3's runner: it moves blocks as planned, then runs M2's flat forward with paged attention."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from m2_batching.runner import SampleRows, decode_rows_first, flat_forward, sample_rows
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.models.hf_model import with_attention

from . import attention
from .block_cache import BlockCache


class ModelRunner:
    """Turns a `StepPlan` into sampled tokens on a Hugging Face model with our attention.

    Args:
        sample_rows: makes tokens of the logits.
    """

    def __init__(
        self, model: PreTrainedModel, cache: BlockCache, sample_rows: SampleRows = sample_rows
    ) -> None:
        self.model = with_attention(model, attention.NAME)
        self.cache = cache
        self.sample_rows = sample_rows

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Move blocks and compute one step. Its tokens are there when this returns."""
        self.cache.move_blocks(plan)
        rows = decode_rows_first(plan)
        if not rows:
            return LaunchedStep(dict)
        self.cache.clear_last_blocks(rows)
        metadata = attention.AttentionMetadata.build(rows, self.cache)
        sampled = flat_forward(self.model, rows, metadata, self.sample_rows)
        return LaunchedStep(lambda: sampled)

    def reset(self) -> None:
        """Do nothing: the next owner of a block clears the places that it does not write."""
