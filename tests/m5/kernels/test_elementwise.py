"""Norms, SiLU * mul and rope with its KV write against their twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from m5_kernels.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_torch,
    embed_rms_norm,
    embed_rms_norm_torch,
)
from m5_kernels.kernels.rope_kv_write import rope_kv_write, rope_kv_write_torch
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def check(kernel: Callable[..., Any], twin: Callable[..., Any], *arguments: Any) -> None:
    """They give the same, and leave the same in all tensors that they were given."""
    results = []
    for function in (kernel, twin):
        own = [each.clone() if torch.is_tensor(each) else each for each in arguments]
        results.append([function(*own), *filter(torch.is_tensor, own)])
    for found, expected in zip(*results, strict=True):
        tolerance = TOLERANCE.get(found.dtype, 0)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [(0, 8), (1, 1), (3, 70), (5, 1000), pytest.param((999, 5120), marks=pytest.mark.gpu)],
    ids=str,
)
def test_norms_and_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    num_tokens, size = shape
    weight = torch.randn(size, dtype=dtype, device=device)
    hidden, residual = torch.randn(2, *shape, dtype=dtype, device=device)
    check(add_rms_norm, add_rms_norm_torch, hidden, residual, weight, 1e-5)
    check(silu_mul, silu_mul_torch, torch.cat((hidden, residual), 1) * 4)
    embedding = torch.randn(50, size, dtype=dtype, device=device)
    input_ids = torch.randint(50, (num_tokens,), dtype=torch.int32, device=device)
    unwritten = torch.full_like(residual, torch.nan)
    check(embed_rms_norm, embed_rms_norm_torch, input_ids, embedding, unwritten, weight, 1e-6)


def test_rows_may_be_apart(device: str) -> None:
    wide, weight = torch.randn(4, 100, device=device), torch.randn(30, device=device)
    residual = torch.randn(4, 30, device=device)
    found = add_rms_norm(wide[:, 20:50], residual.clone(), weight, 1e-6)
    torch.testing.assert_close(found, add_rms_norm_torch(wide[:, 20:50], residual, weight, 1e-6))


@pytest.mark.parametrize(
    "sizes",
    [
        {"has_norm": False},
        *({"num_q_heads": q, "num_kv_heads": kv} for q, kv in ((1, 1), (3, 1), (14, 2), (9, 3))),
        *({"head_dim": head_dim} for head_dim in (64, 80, 96, 128, 256)),
        *({"block_size": block_size} for block_size in (1, 16, 256)),
        pytest.param(
            {"num_tokens": 5000, "num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128},
            marks=pytest.mark.gpu,
        ),
    ],
    ids=str,
)
@DTYPES
def test_rope_kv_write(sizes: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    check(rope_kv_write, rope_kv_write_torch, *rope_inputs(device, dtype, **sizes))


def rope_inputs(
    device: str,
    dtype: torch.dtype,
    num_tokens: int = 5,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 5,
    has_norm: bool = True,
) -> list[Any]:
    """One token is padding; caches hold NaN."""
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width, dtype=dtype, device=device)
    num_blocks = -(-2 * num_tokens // block_size)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"]
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[num_tokens // 2] = -1
    norms = [torch.randn(head_dim, dtype=dtype, device=device) if has_norm else None for _ in "qk"]
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32, device=device)
    angles = torch.rand(50, head_dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    return [qkv, *caches, slots, num_q_heads, positions, cos_sin, *norms, 1e-6]
