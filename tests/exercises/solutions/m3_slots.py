from __future__ import annotations

import torch


def slot_mapping(
    block_tables: torch.Tensor, starts: torch.Tensor, num_new: torch.Tensor, block_size: int
) -> torch.Tensor:
    rows = torch.arange(len(starts)).repeat_interleave(num_new)
    first_places = num_new.cumsum(0) - num_new
    positions = starts[rows] + torch.arange(len(rows)) - first_places[rows]
    return block_tables[rows, positions // block_size] * block_size + positions % block_size


def gather(
    cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = cache[block_tables.clamp(min=0)].flatten(1, 2)
    mask = torch.arange(keys.shape[1]) < context_lens[:, None]
    return keys.masked_fill(~mask[:, :, None, None], 0), mask
