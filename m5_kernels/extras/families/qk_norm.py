"""RMSNorm of all queries, and of all keys, of a token, in place, before they are rotated.

    qkv row of a token   | q0 | q1 | q2 | q3 | k0 | k1 | v0 | v1 |
                         |==== program 0 ====|
                                             |program 1|

The lesson's `rope_kv_write` normalises each head by itself, since a program has a few heads. Here a
program needs them all, so it is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.triton_or_twin import next_power_of_2, tl, triton

from .norms import EXACT, NormWeight, norm_torch


@dataclass(frozen=True)
class NormThenRope:
    """Takes the place of `rope_kv_write`, and calls it after the norms."""

    rope_kv_write: Callable[..., torch.Tensor]

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
        """Do what `rope_kv_write` does. q_norm, k_norm: weights of all heads together."""
        norm_queries_and_keys(qkv, q_norm, k_norm, epsilon, launch)
        return self.rope_kv_write(
            qkv, key_cache, value_cache, slot_mapping, num_q_heads, positions, cos_sin,
            None, None, epsilon, launch,
        )  # fmt: skip


def norm_queries_and_keys(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> None:
    """Normalise the queries and the keys of each token, in place.

    qkv: `[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]`, rows contiguous; q_norm:
    `[num_q_heads * head_dim]`; k_norm: `[num_kv_heads * head_dim]`.
    """
    q_size, k_size = len(q_norm), len(k_norm)
    if not launch.runs_triton(qkv):
        query, key, _ = qkv.split((q_size, k_size, k_size), dim=-1)
        query.copy_(norm_torch(query, NormWeight(EXACT, q_norm), epsilon))
        key.copy_(norm_torch(key, NormWeight(EXACT, k_norm), epsilon))
        return
    row = next_power_of_2(max(q_size, k_size))
    if len(qkv):
        launch.kernel(_qk_norm_kernel, (len(qkv), 2))(
            qkv, q_norm, k_norm, qkv.stride(0), epsilon,
            Q_SIZE=q_size,
            K_SIZE=k_size,
            ROW=row,
            num_warps=min(16, max(1, row // 512)),
            **launch.pdl_options(),
        )  # fmt: skip


@triton.jit
def _qk_norm_kernel(
    qkv, q_norm, k_norm, stride, epsilon,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, ROW)
    is_key = tl.program_id(1) == 1
    size = tl.where(is_key, K_SIZE, Q_SIZE)
    mask = columns < size
    q_weight = tl.load(q_norm + columns, mask=mask & (columns < Q_SIZE), other=0.0)
    k_weight = tl.load(k_norm + columns, mask=mask & (columns < K_SIZE), other=0.0)
    weight = tl.where(is_key, k_weight, q_weight).to(tl.float32)
    start = tl.program_id(0).to(tl.int64) * stride + tl.where(is_key, Q_SIZE, 0)
    wait_for_previous(PDL)
    values = tl.load(qkv + start + columns, mask=mask, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / size + epsilon)
    tl.store(qkv + start + columns, (values * weight).to(qkv.dtype.element_ty), mask=mask)
