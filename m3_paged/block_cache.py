"""The KV tensors of layout BLOCK: per layer `[num_blocks, block_size, num_kv_heads, dim]`,
once for keys and once for values. A token's slot is block * block_size + offset in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.models.kv_shape import KVShape


class BlockCache:
    """Keys and values of all layers in blocks, and the host memory to which they may be swapped."""

    group_of_layers: Sequence[int] = ()
    """The group of each layer, whose block tables it reads; empty: all are in one group."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        dtype: str | None = None,
    ) -> None:
        self.shape = KVShape.of(model, dtype)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = model.device
        self.keys, self.values = self._tensors(num_blocks, self.device)
        host = torch.device("cpu")
        self.host_keys, self.host_values = self._tensors(num_host_blocks, host)
        self._workspace = torch.empty(0)

    def _tensors(
        self, num_blocks: int, device: torch.device
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        shape = self.shape
        size = (num_blocks, self.block_size, shape.num_kv_heads)
        is_pinned = device.type == "cpu" and self.device.type == "cuda" and num_blocks > 0
        # Zeros, not `empty`: a masked position still enters as 0 * value, and 0 * NaN is NaN.
        tensors = [
            torch.zeros(*size, dim, dtype=shape.dtype, device=device, pin_memory=is_pinned)
            for dim in (shape.head_dim, shape.value_dim) * shape.num_layers
        ]
        return tensors[::2], tensors[1::2]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is cleared and moved on the device."""
        return [*self.keys, *self.values]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        """As many in host memory."""
        return [*self.host_keys, *self.host_values]

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store new tokens.

        Args:
            slot_mapping: slot of each token, `[num_tokens]`.
            key: `[num_tokens, num_kv_heads, head_dim]`; `value` likewise, with its `value_dim`.
        """
        self.keys[layer].flatten(0, 1)[slot_mapping] = key
        self.values[layer].flatten(0, 1)[slot_mapping] = value

    def gather(self, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the blocks of block tables, side by side as if they were contiguous.

        Args:
            block_tables: `[num_rows, max_blocks]`.

        Returns:
            Keys `[num_rows, num_kv_heads, max_blocks * block_size, head_dim]`, and values with
            their `value_dim`, in a workspace that the next call overwrites.
        """
        caches, blocks = (self.keys[layer], self.values[layer]), block_tables.flatten()
        sizes = [len(blocks) * cache[0].numel() for cache in caches]
        if self._workspace.numel() < sum(sizes):
            # Keep it and use it again: fresh memory for every layer would cost more than the copy.
            self._workspace = torch.empty(sum(sizes), dtype=self.shape.dtype, device=self.device)
        keys, values = (
            torch.index_select(cache.flatten(1), 0, blocks, out=space.view(len(blocks), -1))
            .view(len(block_tables), -1, *cache.shape[2:])
            .transpose(1, 2)
            for cache, space in zip(caches, self._workspace[: sum(sizes)].split(sizes), strict=True)
        )
        return keys, values

    def clear_last_blocks(self, rows: list[ScheduledRequest]) -> None:
        """Put zeros into blocks that a row begins and does not fill.

        Attention reads whole blocks and masks the positions after a row's context. A masked
        position still enters as 0 * value, so it must not hold a NaN of an earlier owner.
        """
        begun = []
        for row in rows:
            last = (row.end - 1) // self.block_size
            if row.start <= last * self.block_size and row.end % self.block_size:
                begun.append(row.blocks[last])
        if begun:
            blocks = torch.tensor(begun, device=self.device)
            for tensor in self.tensors:
                tensor.index_fill_(0, blocks, 0)

    def move_blocks(self, plan: StepPlan) -> None:
        """Make a plan's moves, before its forward pass: swap out, swap in and copy, in this
        order."""
        if plan.swap_outs:
            blocks, runs = self._by_host_block(plan.swap_outs)
            for tensor, host in zip(self.tensors, self.host_tensors, strict=True):
                moved = tensor[blocks]
                for place, run in runs:
                    host[run].copy_(moved[place], non_blocking=True)
        if plan.swap_ins:
            blocks, runs = self._by_host_block([(to, source) for source, to in plan.swap_ins])
            for tensor, host in zip(self.tensors, self.host_tensors, strict=True):
                moved = tensor.new_empty(len(blocks), *tensor.shape[1:])
                for place, run in runs:
                    moved[place].copy_(host[run], non_blocking=True)
                tensor[blocks] = moved
        if plan.copies:
            sources, targets = torch.tensor(plan.copies, device=self.device).T
            for tensor in self.tensors:
                tensor[targets] = tensor[sources]

    def _by_host_block(
        self, moves: list[tuple[int, int]]
    ) -> tuple[torch.Tensor, list[tuple[slice, slice]]]:
        """Return the device blocks of (device, host) moves, and for each run of consecutive host
        blocks its range among the moves and its range in host memory.

        Consecutive blocks in host memory cross the bus in one copy a layer. The CPU does not wait:
        host memory is pinned, and later work on the device runs after the copy.
        """
        moves = sorted(moves, key=lambda move: move[1])
        starts = [
            place
            for place, (_, host) in enumerate(moves)
            if place == 0 or host != moves[place - 1][1] + 1
        ]
        runs = []
        for start, end in pairwise([*starts, len(moves)]):
            first = moves[start][1]
            runs.append((slice(start, end), slice(first, first + end - start)))
        return torch.tensor([block for block, _ in moves], device=self.device), runs
