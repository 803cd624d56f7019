"""M3's runner for layers in groups: each group reads and writes through block tables of its own.

    layer 0   group 1, place 0      tensor 0   [ blocks of any group ]
    layer 1   group 0, place 0      tensor 0
    layer 2   group 1, place 1      tensor 1   [ blocks of any group ]
    layer 3   group 0, place 1      tensor 1

Layers at the same place of their groups share a tensor. They never meet in it, since a block
belongs to one group at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from m2_batching.runner import SampleRows, decode_rows_first, flat_forward, sample_rows
from m3_paged.attention import AttentionMetadata, paged_attention
from m3_paged.block_cache import BlockCache
from milestone_llm.core.kv import NULL_BLOCK
from milestone_llm.core.plan import LaunchedStep, ScheduledRequest, StepPlan
from milestone_llm.models.hf_model import with_attention

from .layer_groups import LayerGroups

NAME = "hybrid_paged_attention"


class HybridBlockCache(BlockCache):
    """Keys and values of all layers, in as many tensors as a group has layers.

    The last block of each tensor holds zeros and belongs to nobody: `NULL_BLOCK` is read there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        block_size: int,
        groups: LayerGroups,
        num_host_blocks: int = 0,
        dtype: str | None = None,
    ) -> None:
        self.groups, self.group_of_layers = groups, groups.group_of_layers()
        super().__init__(model, num_blocks + 1, block_size, num_host_blocks, dtype)
        self.num_blocks = num_blocks

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Each tensor once, though several layers share it."""
        return list(dict.fromkeys(super().tensors))

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        """As many in host memory."""
        return list(dict.fromkeys(super().host_tensors))

    def _tensors(
        self, num_blocks: int, device: torch.device
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.shape = replace(self.shape, num_layers=self.groups.size)
        keys, values = super()._tensors(num_blocks, device)
        places = self.groups.place_of_layers()
        return [keys[place] for place in places], [values[place] for place in places]

    def table(self, blocks: list[int]) -> list[int]:
        """Return a block table as attention reads it: a block that was given back holds zeros."""
        return [self.num_blocks if block == NULL_BLOCK else block for block in blocks]


@dataclass(frozen=True)
class GroupedMetadata:
    """A step's data for attention, by group of layers."""

    group_of_layers: Sequence[int]
    groups: list[AttentionMetadata]


class HybridModelRunner:
    """Turns a `StepPlan` into sampled tokens, as M3's runner does.

    Args:
        sample_rows: makes tokens of the logits.
    """

    def __init__(
        self, model: PreTrainedModel, cache: HybridBlockCache, sample_rows: SampleRows = sample_rows
    ) -> None:
        self.model = with_attention(model, NAME)
        self.cache = cache
        self.sample_rows = sample_rows

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Move blocks and compute one step. Its tokens are there when this returns."""
        self.cache.move_blocks(plan)
        rows = decode_rows_first(plan)
        if not rows:
            return LaunchedStep(dict)
        groups = []
        for group in range(len(self.cache.groups)):
            own = [self._row_in_group(row, group) for row in rows]
            self.cache.clear_last_blocks(own)
            groups.append(AttentionMetadata.build(own, self.cache))
        metadata = GroupedMetadata(self.cache.group_of_layers, groups)
        sampled = flat_forward(self.model, rows, metadata, self.sample_rows)
        return LaunchedStep(lambda: sampled)

    def _row_in_group(self, row: ScheduledRequest, group: int) -> ScheduledRequest:
        own = copy.copy(row)
        own.blocks = self.cache.table(row.group_blocks[group])
        return own

    def reset(self) -> None:
        """Do nothing: the next owner of a block clears the places that it does not write."""


def hybrid_attention(
    module: torch.nn.Module,
    *tensors: torch.Tensor,
    attention_metadata: GroupedMetadata,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute M3's attention with the block tables of the layer's group."""
    metadata, layer = attention_metadata, int(module.layer_idx)  # type: ignore[arg-type]
    own = metadata.groups[metadata.group_of_layers[layer]]
    return paged_attention(module, *tensors, attention_metadata=own, **kwargs)


AttentionInterface.register(NAME, hybrid_attention)
