"""Runs a step as one flat `[1, num_tokens]` batch: no padding, prefill and decode side by side."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from milestone_llm.engine.plan import ScheduledRequest, StepPlan
from milestone_llm.engine.request import SampledToken
from milestone_llm.engine.sampling import sample
from milestone_llm.models.hf_model import attention_function, refuse_unsupported

from . import attention
from .cpu_linear import fast_for_few_rows


class ModelRunner:
    """Turns a `StepPlan` into sampled tokens on a Hugging Face model with our attention.

    Args:
        cache: the KV tensors that the attention function writes and reads.
    """

    attention_name = attention.NAME

    def __init__(self, model: PreTrainedModel, cache: Any) -> None:
        refuse_unsupported(model)
        self.model = model
        self.cache = cache

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> dict[str, SampledToken]:
        """Compute one step.

        Returns:
            A token for each row that samples, by request id.
        """
        rows = sorted(plan.rows, key=lambda row: row.phase != "decode")  # decode first, stable
        input_ids = [token for row in rows for token in row.request.token_ids[row.start : row.end]]
        position_ids = [position for row in rows for position in range(row.start, row.end)]
        sampling_requests, last_tokens, end = [], [], 0
        for row in rows:
            end += row.num_new_tokens
            sampling_requests += row.sampling_requests
            last_tokens += [end - 1] * len(row.sampling_requests)
        device = self.model.device
        with (
            attention_function(self.model, self.attention_name),
            fast_for_few_rows(device),
        ):
            output = self.model(
                input_ids=torch.tensor([input_ids], device=device),
                position_ids=torch.tensor([position_ids], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(last_tokens, dtype=torch.long, device=device),
                attention_metadata=self.attention_metadata(rows),
            )
        return sample(output.logits[0], sampling_requests)

    def recover(self) -> Any:
        """After a step that raised: clean the cache. Returns what its `scrub` returns."""
        return self.cache.scrub()

    def attention_metadata(self, rows: list[ScheduledRequest]) -> Any:
        """What the attention function must know of this step."""
        return attention.AttentionMetadata.build(rows, self.cache)
