"""Embedding or addition with RMSNorm, and SiLU * mul, against their twins."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_torch,
    embed_rms_norm,
    embed_rms_norm_torch,
)
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SHAPES = pytest.mark.parametrize(
    "shape", [(1, 1), (3, 70), (5, 1000), pytest.param((999, 5120), marks=pytest.mark.gpu)], ids=str
)


def close(output: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@SHAPES
def test_embed_rms_norm_begins_the_residual(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    embedding = torch.randn(50, shape[1], dtype=dtype, device=device)
    input_ids = torch.randint(50, (shape[0],), dtype=torch.int32, device=device)
    weight = torch.randn(shape[1], dtype=dtype, device=device)
    residual, expected_residual = torch.full((2, *shape), torch.nan, dtype=dtype, device=device)
    expected = embed_rms_norm_torch(input_ids, embedding, expected_residual, weight, 1e-6)
    close(embed_rms_norm(input_ids, embedding, residual, weight, 1e-6), expected)
    assert torch.equal(residual, expected_residual)


@DTYPES
@SHAPES
def test_add_rms_norm_updates_the_residual(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    hidden, residual = torch.randn(2, *shape, dtype=dtype, device=device)
    weight = torch.randn(shape[1], dtype=dtype, device=device)
    expected_residual = residual.clone()
    expected = add_rms_norm_torch(hidden, expected_residual, weight, 1e-5)
    close(add_rms_norm(hidden, residual, weight, 1e-5), expected)
    close(residual, expected_residual)  # the interpreter cuts bf16 numbers instead of rounding


def test_rows_may_be_apart(device: str) -> None:
    wide = torch.randn(4, 100, device=device)
    weight = torch.randn(30, device=device)
    residual = torch.randn(4, 30, device=device)
    expected = add_rms_norm_torch(wide[:, 20:50], residual.clone(), weight, 1e-6)
    close(add_rms_norm(wide[:, 20:50], residual, weight, 1e-6), expected)


@DTYPES
@SHAPES
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1], dtype=dtype, device=device) * 4
    close(silu_mul(gate_up), silu_mul_torch(gate_up))


def test_no_tokens_at_all(device: str) -> None:
    empty = torch.empty(0, 8, device=device)
    assert add_rms_norm(empty, empty, torch.ones(8, device=device), 1e-6).shape == (0, 8)
    assert silu_mul(empty).shape == (0, 4)
