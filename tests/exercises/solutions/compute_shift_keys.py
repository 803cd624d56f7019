"""A solution of exercises/compute_shift_keys.py."""

from __future__ import annotations

import torch


def shift_keys(keys: torch.Tensor, by: int, theta: float) -> torch.Tensor:
    """Rotated keys `[num_heads, num_tokens, head_dim]`, each moved by `by` positions (3, or -3)."""
    half = keys.shape[-1] // 2
    angles = by * theta ** (-torch.arange(half) / half)  # the same for all tokens
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
