from __future__ import annotations

import torch
import torch.nn.functional as F


def expand(
    num_computed: torch.Tensor,
    num_new: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ends = num_new.cumsum(0)
    tokens = torch.arange(num_tokens, device=num_new.device)
    is_real = tokens < ends[-1]
    seqs = torch.searchsorted(ends, tokens, right=True).clamp(max=len(num_new) - 1)
    positions = num_computed[seqs] + tokens - (ends - num_new)[seqs]
    positions = torch.where(is_real, positions, 0)
    slots = block_tables[seqs, positions // block_size] * block_size + positions % block_size
    slot_mapping = torch.where(is_real, slots, -1)
    return positions, slot_mapping, F.pad(ends, (1, 0)), num_computed + num_new
