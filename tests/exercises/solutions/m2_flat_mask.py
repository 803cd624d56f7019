from __future__ import annotations

import torch


def flatten(rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ends = [start + num_new for start, num_new in rows]
    positions = torch.cat(
        [torch.arange(start, end) for (start, _), end in zip(rows, ends, strict=True)]
    )
    key_positions = torch.cat([torch.arange(end) for end in ends])
    index = torch.arange(len(rows))
    token_rows = index.repeat_interleave(torch.tensor([num_new for _, num_new in rows]))
    key_rows = index.repeat_interleave(torch.tensor(ends))
    is_own = token_rows[:, None] == key_rows[None, :]
    is_past = key_positions[None, :] <= positions[:, None]
    return positions, is_own & is_past
