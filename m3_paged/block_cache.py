"""The KV tensors of layout BLOCK: per layer `[num_blocks, block_size, num_kv_heads, head_dim]`,
once for keys and once for values. A token's slot is block * block_size + offset in the block.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from m2_batching.slot_cache import KVShape


class BlockCache:
    """Keys and values of all layers in blocks, and the host memory to which they may be swapped."""

    def __init__(
        self, model: PreTrainedModel, num_blocks: int, block_size: int, num_host_blocks: int = 0
    ) -> None:
        self.shape = KVShape.of(model)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = model.device
        self.keys, self.values = self._tensors(num_blocks, self.device)
        host = torch.device("cpu")
        self.host_keys, self.host_values = self._tensors(num_host_blocks, host)
        self._workspace = torch.empty(0)

    def _tensors(
        self, num_blocks: int, device: torch.device
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        size = (num_blocks, self.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        is_pinned = device.type == "cpu" and self.device.type == "cuda" and num_blocks > 0
        # Zeros, not `empty`: a masked position still enters as 0 * value, and 0 * NaN is NaN.
        tensors = [
            torch.zeros(size, dtype=self.shape.dtype, device=device, pin_memory=is_pinned)
            for _ in range(2 * self.shape.num_layers)
        ]
        return tensors[::2], tensors[1::2]

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store new tokens.

        Args:
            slot_mapping: slot of each token, `[num_tokens]`.
            key: `[num_tokens, num_kv_heads, head_dim]`; `value` likewise.
        """
        self.keys[layer].flatten(0, 1)[slot_mapping] = key
        self.values[layer].flatten(0, 1)[slot_mapping] = value

    def gather(self, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of some tables, side by side as if they were contiguous.

        Args:
            block_tables: `[num_rows, max_blocks]`.

        Returns:
            Keys and values, each `[num_rows, num_kv_heads, max_blocks * block_size, head_dim]`, in
            a workspace that the next call overwrites.
        """
        num_rows, num_blocks = block_tables.shape
        row = self.block_size * self.shape.num_kv_heads * self.shape.head_dim
        size = (2, num_rows * num_blocks, row)
        if self._workspace.numel() < num_rows * num_blocks * row * 2:
            # Kept and used again: fresh memory for every layer would cost more than the copying.
            self._workspace = torch.empty(
                size, dtype=self.shape.dtype, device=self.device
            ).flatten()
        space = self._workspace[: num_rows * num_blocks * row * 2].view(size)
        flat_tables = block_tables.flatten()
        torch.index_select(self.keys[layer].view(-1, row), 0, flat_tables, out=space[0])
        torch.index_select(self.values[layer].view(-1, row), 0, flat_tables, out=space[1])
        rows = space.view(2, num_rows, -1, self.shape.num_kv_heads, self.shape.head_dim)
        return rows[0].transpose(1, 2), rows[1].transpose(1, 2)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks on the device: (from, to) pairs, all read before any is written."""
        for tensors in (self.keys, self.values):
            _move(tensors, tensors, copies)

    def scrub(self) -> set[int]:
        """Put zeros for NaN and infinity: through the mask they would reach the next owner.

        Returns:
            The blocks on the device that held any.
        """
        is_broken = torch.zeros(self.num_blocks, dtype=torch.bool, device=self.device)
        for tensor in (*self.keys, *self.values):
            is_broken |= ~tensor.isfinite().flatten(1).all(1)
        for tensor in (*self.keys, *self.values, *self.host_keys, *self.host_values):
            tensor.nan_to_num_(0, 0, 0)
        return set(is_broken.nonzero().flatten().tolist())

    def swap_out(self, moves: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to host memory."""
        _move(self.keys, self.host_keys, moves)
        _move(self.values, self.host_values, moves)

    def swap_in(self, moves: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs back to the device."""
        _move(self.host_keys, self.keys, moves)
        _move(self.host_values, self.values, moves)


def _move(
    sources: list[torch.Tensor], targets: list[torch.Tensor], moves: list[tuple[int, int]]
) -> None:
    """Copy blocks of every layer, on one device or across."""
    if not moves:
        return
    from_blocks = torch.tensor([pair[0] for pair in moves], device=sources[0].device)
    to_blocks = torch.tensor([pair[1] for pair in moves], device=targets[0].device)
    for source, target in zip(sources, targets, strict=True):
        target[to_blocks] = source[from_blocks].to(target.device)
