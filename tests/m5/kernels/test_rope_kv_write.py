"""QK-norm + RoPE + KV write against its twin."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.kernels.rope_kv_write import rope_kv_write, rope_kv_write_torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def check(
    device: str,
    num_tokens: int = 5,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 5,
    dtype: torch.dtype = torch.float32,
    has_norm: bool = True,
) -> None:
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width, dtype=dtype, device=device)
    num_blocks = -(-2 * num_tokens // block_size)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[num_tokens // 2] = -1
    norms = [torch.randn(head_dim, dtype=dtype, device=device) if has_norm else None for _ in "qk"]
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32, device=device)
    angles = torch.rand(50, head_dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    results = []
    for function in (rope_kv_write, rope_kv_write_torch):
        own_qkv, own_caches = qkv.clone(), [cache.clone() for cache in caches]
        query = function(own_qkv, *own_caches, slots, num_q_heads, positions, cos_sin, *norms, 1e-6)
        assert query.data_ptr() == own_qkv.data_ptr(), "queries are changed in place"
        results.append((query, *own_caches))
    for output, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True
        )


@pytest.mark.parametrize("has_norm", [False, True])
def test_norms_are_optional(has_norm: bool, device: str) -> None:
    check(device, has_norm=has_norm)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (3, 1), (14, 2), (9, 3)])
def test_head_counts(num_q_heads: int, num_kv_heads: int, device: str) -> None:
    check(device, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_head_dims_and_types(head_dim: int, dtype: torch.dtype, device: str) -> None:
    check(device, num_tokens=3, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_block_sizes(block_size: int, device: str) -> None:
    check(device, block_size=block_size)


@pytest.mark.gpu
def test_many_tokens() -> None:
    check("cuda", 5000, 16, 8, 128, 16, torch.bfloat16)
