"""Norm, rotate and store query, key and value between the QKV layer and attention, in one launch.

    qkv row of a token   | q0 | q1 | ... | k0 | k1 | ... | v0 | v1 | ... |   merged QKV output
                           |____________|  |__________|    |
    norm (qwen3)             x rms, weight    likewise     |
    rotate by position       in place         |            |
                                              v            v
    slot of the token                      key_cache    value_cache

One program takes one token and HEADS of its heads, as two tiles `[HEADS, head_dim / 2]`, since
rotary embeddings (in the layout of Hugging Face) pair element i with element i + head_dim / 2.
Separate kernels would be five launches, and three more trips of query and key through memory.
Paper: Su et al., RoFormer (2021).
"""

from __future__ import annotations

import torch

from .kv_write import to_cache_dtype
from .launch import PLAIN, Launch
from .pdl import wait_for_previous
from .rms_norm import rms_norm_torch
from .triton_or_twin import ceil_div, next_power_of_2, tl, triton


def rope_kv_write(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    launch: Launch = PLAIN,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries in place; normalise, rotate and store keys; store values.

    qkv: `[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]`, rows contiguous.
    key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, same strides.
    slot_mapping: int64 `[num_tokens]`, block * block_size + offset; -1 stores nothing.
    positions: int `[num_tokens]`; cos_sin: fp32 `[max_positions, head_dim]`, a position's cosines,
    then its sines.
    q_norm, k_norm: `[head_dim]` RMSNorm weights, or both None; epsilon is that of these norms.
    row_scale: fp32 `[num_tokens]`, a factor of each row of qkv; None: 1.
    The kernel may start before the previous one ends. Of its arguments, that one may write only
    qkv.
    Returns the queries, a view `[num_tokens, num_q_heads, head_dim]` of qkv.
    """
    if not launch.runs_triton(qkv):
        return rope_kv_write_torch(
            qkv, key_cache, value_cache, slot_mapping, num_q_heads,
            positions, cos_sin, q_norm, k_norm, epsilon, row_scale,
        )  # fmt: skip
    num_tokens = qkv.shape[0]
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    num_heads = num_q_heads + 2 * num_kv_heads
    heads = min(8, next_power_of_2(num_heads))
    if num_tokens:
        launch.kernel(_rope_kv_write_kernel, (num_tokens, ceil_div(num_heads, heads)))(
            qkv, key_cache, value_cache, slot_mapping, positions, cos_sin, q_norm, k_norm,
            row_scale, epsilon,
            qkv.stride(0), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
            NUM_Q_HEADS=num_q_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_PAD=next_power_of_2(head_dim // 2),
            BLOCK_SIZE=block_size,
            HEADS=heads,
            num_warps=2,
            **launch.pdl_options(),
        )  # fmt: skip
    return qkv[:, : num_q_heads * head_dim].unflatten(1, (num_q_heads, head_dim))


@triton.jit
def _rope_kv_write_kernel(
    qkv, key_cache, value_cache, slot_mapping, positions, cos_sin, q_norm, k_norm,
    row_scale, epsilon,
    qkv_stride, block_stride, slot_stride, head_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    halves = tl.arange(0, HALF_PAD)
    is_half = halves < HALF
    is_query = heads < NUM_Q_HEADS
    is_key = (heads >= NUM_Q_HEADS) & (heads < NUM_Q_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_Q_HEADS + NUM_KV_HEADS) & (heads < NUM_Q_HEADS + 2 * NUM_KV_HEADS)
    mask = (is_query | is_key | is_value)[:, None] & is_half[None, :]
    row = qkv + token * qkv_stride + heads[:, None] * HEAD_DIM + halves[None, :]
    dtype = qkv.dtype.element_ty
    slot = tl.load(slot_mapping + token)
    if q_norm is not None:
        weight_low = _norm_of_heads(is_query, q_norm, k_norm, halves, is_half)
        weight_high = _norm_of_heads(is_query, q_norm + HALF, k_norm + HALF, halves, is_half)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM + halves
    # Values are "rotated" by an angle of zero.
    cos = tl.where(is_value[:, None], 1.0, tl.load(angles, mask=is_half, other=1.0)[None, :])
    sin = tl.load(angles + HALF, mask=is_half, other=0.0)[None, :]
    sin = tl.where(is_value[:, None], 0.0, sin)

    wait_for_previous(PDL)
    low = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    if row_scale is not None:
        factor = tl.load(row_scale + token)
        low = (low * factor).to(dtype).to(tl.float32)
        high = (high * factor).to(dtype).to(tl.float32)
    if q_norm is not None:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(square / HEAD_DIM + epsilon)[:, None]
        # Round where Hugging Face rounds: before the weight and after it.
        normed_low = ((low * scale).to(dtype).to(tl.float32) * weight_low).to(dtype)
        normed_high = ((high * scale).to(dtype).to(tl.float32) * weight_high).to(dtype)
        low = tl.where(is_value[:, None], low, normed_low.to(tl.float32))
        high = tl.where(is_value[:, None], high, normed_high.to(tl.float32))
    low, high = low * cos - high * sin, high * cos + low * sin
    low = low.to(dtype)
    high = high.to(dtype)
    query_mask = is_query[:, None] & is_half[None, :]
    tl.store(row, low, mask=query_mask)
    tl.store(row + HALF, high, mask=query_mask)
    if slot >= 0:
        place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
        kv_heads = tl.where(is_key, heads - NUM_Q_HEADS, heads - NUM_Q_HEADS - NUM_KV_HEADS)
        offsets = place + kv_heads[:, None] * head_stride + halves[None, :]
        key_mask = is_key[:, None] & is_half[None, :]
        tl.store(key_cache + offsets, low.to(key_cache.dtype.element_ty), mask=key_mask)
        tl.store(key_cache + offsets + HALF, high.to(key_cache.dtype.element_ty), mask=key_mask)
        value_mask = is_value[:, None] & is_half[None, :]
        tl.store(value_cache + offsets, low.to(key_cache.dtype.element_ty), mask=value_mask)
        tl.store(value_cache + offsets + HALF, high.to(key_cache.dtype.element_ty), mask=value_mask)


@triton.jit
def _norm_of_heads(is_query, q_norm, k_norm, halves, is_half):
    """Return each head's norm weights.

    Both are loaded before one is chosen: AMD's compiler cannot choose between pointers.
    """
    q = tl.load(q_norm + halves, mask=is_half, other=0.0).to(tl.float32)
    k = tl.load(k_norm + halves, mask=is_half, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


def rope_kv_write_torch(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specify `rope_kv_write`."""
    if row_scale is not None:
        qkv.copy_(qkv.float() * row_scale[:, None])
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    query, key, value = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    query.copy_(norm_and_rotate_torch(query, positions, cos_sin, q_norm, epsilon))
    rotated_key = norm_and_rotate_torch(key, positions, cos_sin, k_norm, epsilon)
    write_kv_torch(rotated_key, value, key_cache, value_cache, slot_mapping)
    return query


def norm_and_rotate_torch(
    heads: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Return queries or keys `[num_tokens, num_heads, head_dim]`, normalised and rotated."""
    if norm is not None:
        heads = rms_norm_torch(heads, norm, epsilon).to(heads.dtype)
    cos, sin = cos_sin[positions.long()][:, None, :].chunk(2, dim=-1)
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store keys and values in their slots, without asking the host which tokens are padding.

    Padding writes once more what the first token writes. The first token is never padding if any
    request is in the step.
    """
    is_padding = slot_mapping < 0
    slots = torch.where(is_padding, slot_mapping[:1], slot_mapping)
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        rows = torch.where(is_padding[:, None, None], new[:1], new)
        cache[blocks, offsets] = to_cache_dtype(rows, cache.dtype)
