"""Hugging Face's modules with our attention kernels.

For families without a fused decoder, and for a ready model that does more than its config and its
weights say.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from m2_batching.runner import decode_rows_first, flat_forward
from m3_paged.block_cache import BlockCache
from m4_prefix_chunked.verification import sample_and_verify
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.models.hf_model import with_attention

from .decoder.attention import Attention
from .kernels.step_metadata import StepMetadata

NAME = "flash_decoding"

attend = Attention()
CacheAndMetadata = tuple[BlockCache, StepMetadata]


class HFRunner:
    """Turns a `StepPlan` into sampled tokens; only the attention function differs from M3's."""

    def __init__(self, model: PreTrainedModel, cache: BlockCache) -> None:
        self.model = with_attention(model, NAME)
        self.cache = cache

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Move blocks and compute one step. Its tokens are there when this returns."""
        self.cache.move_blocks(plan)
        rows = decode_rows_first(plan)
        if not rows:
            return LaunchedStep(dict)
        with torch.cuda.device_of(self.cache.keys[0]):  # where Triton launches its kernels
            sampled = flat_forward(self.model, rows, self._metadata(rows), sample_and_verify)
        return LaunchedStep(lambda: sampled)

    def reset(self) -> None:
        """Nothing to do: no kernel reads a slot beyond its context."""

    def _metadata(self, rows: list[ScheduledRequest]) -> CacheAndMetadata:
        """Cache and metadata of this step, for `flash_decoding`."""
        size, device = self.cache.block_size, self.cache.device
        num_decode = sum(row.phase == "decode" and row.num_new_tokens == 1 for row in rows)
        max_blocks = max(len(row.blocks) for row in rows)
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.num_new_tokens)
        positions = [(row, p) for row in rows for p in range(row.start, row.end)]

        def tensor(values: list[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        metadata = StepMetadata(
            input_ids=tensor([]),  # the model has them, and the host's sampler knows positions
            output_positions=tensor([]),
            positions=tensor([position for _, position in positions]),
            slot_mapping=tensor(
                [row.blocks[p // size] * size + p % size for row, p in positions], torch.int64
            ),
            block_table=tensor([row.blocks + [0] * (max_blocks - len(row.blocks)) for row in rows]),
            context_lens=tensor([row.end for row in rows]),
            query_start_loc=tensor(starts),
            decode_lens=tensor([row.end for row in rows[:num_decode]]),
            first_chunk=tensor([num_decode]),
            num_decodes=num_decode,
            num_chunks=len(rows) - num_decode,
        )
        return self.cache, metadata


def flash_decoding(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_metadata: CacheAndMetadata,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Hugging Face's modules call, once a layer.

    Args:
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, not repeated for GQA; `value` likewise.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no attention weights.
    """
    cache, metadata = attention_metadata
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    cache.write(layer, metadata.slot_mapping, key, value)
    output = attend(
        query.contiguous(),
        cache.keys[layer],
        cache.values[layer],
        metadata,
        scaling,
        sliding_window,
    )
    return output[None], None


AttentionInterface.register(NAME, flash_decoding)
