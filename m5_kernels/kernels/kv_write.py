"""Store keys and values of new tokens in their slots, after a model's modules rotated the keys.

    key, value of a token   | k0 | k1 | ... |    | v0 | v1 | ... |
                                  |                    |
    slot of the token        key_cache            value_cache

One program stores one token. A padding token has slot -1 and is not stored, so a step of any size
can be part of a CUDA graph. The fused decoder stores and rotates in one kernel, `rope_kv_write`.
"""

from __future__ import annotations

import torch

from .launch import PLAIN, Launch
from .pdl import wait_for_previous
from .triton_or_twin import next_power_of_2, tl, triton


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    launch: Launch = PLAIN,
) -> None:
    """Store keys and values of all tokens that have a slot.

    key, value: `[num_tokens, num_kv_heads, head_dim]`.
    key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous.
    slot_mapping: int64 `[num_tokens]`, block * block_size + offset; -1 stores nothing.
    """
    if not launch.runs_triton(key):
        kv_write_torch(key, value, key_cache, value_cache, slot_mapping)
        return
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens:
        size = num_kv_heads * head_dim
        launch.kernel(_kv_write_kernel, (num_tokens,))(
            key.contiguous(), value.contiguous(), key_cache, value_cache, slot_mapping,
            SIZE=size,
            SIZE_PAD=next_power_of_2(size),
            num_warps=4,
            **launch.pdl_options(),
        )  # fmt: skip


@triton.jit
def _kv_write_kernel(
    key, value, key_cache, value_cache, slot_mapping,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PAD)
    slot = tl.load(slot_mapping + token)
    mask = (columns < SIZE) & (slot >= 0)
    wait_for_previous(PDL)
    for_key = tl.load(key + token * SIZE + columns, mask=mask)
    for_value = tl.load(value + token * SIZE + columns, mask=mask)
    tl.store(key_cache + slot * SIZE + columns, for_key, mask=mask)
    tl.store(value_cache + slot * SIZE + columns, for_value, mask=mask)


def kv_write_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Specify `kv_write`."""
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slots] = to_cache_dtype(new[is_stored], cache.dtype)


def to_cache_dtype(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values as the cache holds them. In e4m3, what is too large becomes 448."""
    if dtype.itemsize > 1:
        return rows
    most = torch.finfo(dtype).max
    return rows.clamp(-most, most).to(dtype)
