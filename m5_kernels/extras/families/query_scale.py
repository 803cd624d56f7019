"""Queries that are multiplied after they are rotated: by a factor of their position, or by norms.

Norms of rotated queries and keys need no kernel of their own. A rotation does not change the length
of a head, so RMSNorm without its weight may as well come before it, as in the lesson. A score is
the sum of `(q * q_weight) * (k * k_weight)`, so queries may have both weights, and keys none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from m5_kernels.kernels.launch import PLAIN, Launch


@dataclass(frozen=True)
class RopeThenScale:
    """Takes the place of `rope_kv_write`, and multiplies queries by factors of their positions."""

    rope_kv_write: Callable[..., torch.Tensor]
    factors: torch.Tensor
    """fp32 `[max_positions]`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_q_heads: int,
        positions: torch.Tensor,
        *others: object,
    ) -> torch.Tensor:
        """Do what `rope_kv_write` does, then multiply. The other arguments are passed on."""
        query = self.rope_kv_write(
            qkv, key_cache, value_cache, slot_mapping, num_q_heads, positions, *others
        )
        return query.mul_(self.factors.index_select(0, positions)[:, None, None])


@dataclass(frozen=True)
class RopeThenNorm:
    """Takes the place of `rope_kv_write`, for norms of queries and keys that are rotated."""

    rope_kv_write: Callable[..., torch.Tensor]
    ones: torch.Tensor
    """`[head_dim]`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_q_heads: int,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        epsilon: float = 1e-6,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Do what `rope_kv_write` does. q_norm, k_norm: weights of a head, fp32 `[head_dim]`."""
        query = self.rope_kv_write(
            qkv, key_cache, value_cache, slot_mapping, num_q_heads, positions, cos_sin,
            self.ones, self.ones, epsilon, launch,
        )  # fmt: skip
        return query.mul_(q_norm * k_norm)


def position_factors(beta: float, length: int, max_positions: int) -> torch.Tensor:
    """Return the factor of each position, `1 + beta * log(1 + position // length)`, as Llama 4."""
    return 1 + beta * torch.log1p((torch.arange(max_positions) // length).float())
