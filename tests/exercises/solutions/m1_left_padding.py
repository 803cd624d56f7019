from __future__ import annotations

import torch


def pad_left(
    prompts: list[list[int]], pad_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        first = width - len(prompt)
        input_ids[row, first:] = torch.tensor(prompt)
        attention_mask[row, first:] = 1
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return input_ids, attention_mask, position_ids
