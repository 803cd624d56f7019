"""Kernels that round activations to e4m3, and products and attention that read such numbers."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.extras.quantization.fp8_one_row import one_row_fp8
from m5_kernels.extras.quantization.fp8_rows import (
    RoundedRows,
    ScaledRows,
    add_norm,
    round_rows,
    silu_mul_rounded,
)
from m5_kernels.extras.quantization.fp8_weight import E4M3, Fp8Weight
from m5_kernels.kernels.flash_decode import flash_decode, flash_decode_torch
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.paged_prefill import paged_prefill, paged_prefill_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write
from m5_kernels.tools.measure import PagedBatch, relative_error

pytestmark = pytest.mark.usefixtures("poisoned")
TWINS = Launch(uses_twins=True)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
"""Triton's interpreter cuts bf16 off, and each place that rounds would differ."""


def check_e4m3(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Numbers in e4m3 are the same on a GPU.

    Triton's interpreter rounds ties up, and halves a number that is rounded up to a power of two:
    there 19 of 20 must be the same within a step.
    """
    found, expected = found.float(), expected.float()
    least = 1.0 if found.is_cuda else 0.95
    is_close = torch.isclose(found, expected, rtol=0.126, atol=2**-8, equal_nan=True)
    assert not found.numel() or is_close.float().mean() >= least


def check_rounded(found: RoundedRows, expected: RoundedRows) -> None:
    torch.testing.assert_close(found.scale, expected.scale, rtol=2e-2, atol=1e-9, equal_nan=True)
    check_e4m3(found.values, expected.values)


@DTYPES
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 70), (2, 4100)], ids=str)
def test_rows_are_rounded(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    rows, residual = torch.randn(2, *shape, dtype=dtype, device=device)
    rows[1:2] = 0
    check_rounded(round_rows(rows), round_rows(rows, TWINS))
    scale = torch.rand(len(rows), device=device) + 0.1
    both = ScaledRows(torch.cat((rows, residual), 1) * 9, scale)
    check_rounded(silu_mul_rounded(both), silu_mul_rounded(both, TWINS))
    weight = torch.randn(shape[1], dtype=dtype, device=device)
    for rounds in (True, False):
        sums = residual.clone(), residual.clone()
        product = ScaledRows(rows, scale)
        found, expected = (
            add_norm(product, each, weight, 1e-6, launch, rounds)
            for each, launch in zip(sums, (Launch(), TWINS), strict=True)
        )
        torch.testing.assert_close(*sums, rtol=1e-2, atol=1e-2)
        if isinstance(found, RoundedRows) and isinstance(expected, RoundedRows):
            check_rounded(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=4e-2, atol=4e-2)


def test_a_nan_stays_in_its_row(device: str) -> None:
    rows = torch.randn(3, 70, device=device)
    rows[1, 69] = torch.nan
    for rounded in (round_rows(rows), round_rows(rows, TWINS)):
        assert rounded.scale.isnan().tolist() == [False, True, False]
        assert not rounded.values[::2].float().isnan().any()


@DTYPES
@pytest.mark.parametrize("size", [(24, 37), (6, 1500), (4, 4112)], ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
def test_one_row(size: tuple[int, int], is_gated: bool, dtype: torch.dtype, device: str) -> None:
    weight = Fp8Weight(*size, dtype, device)
    weight.round_from(torch.randn(size, device=device))
    bias = torch.randn(size[0], dtype=dtype, device=device)
    row = torch.randn(1, size[1], dtype=dtype, device=device) / size[1] ** 0.5
    expected = one_row_fp8(row.double(), weight, bias.double(), is_gated, launch=TWINS)
    assert relative_error(one_row_fp8(row, weight, bias, is_gated), expected) < 2e-2


@DTYPES
def test_attention_over_a_cache_in_e4m3(dtype: torch.dtype, device: str) -> None:
    lens = [1, 17, 40]
    for query_lens, kernel, twin in (
        ([1, 1, 1], flash_decode, flash_decode_torch),
        ([1, 5, 33], paged_prefill, paged_prefill_torch),
    ):
        batch = PagedBatch.random(lens, query_lens, 4, 2, 32, 8, dtype, device)
        caches = batch.key_cache.to(E4M3), batch.value_cache.to(E4M3)
        more = (batch.query_start_loc,) if kernel is paged_prefill else ()
        arguments = (batch.query, *caches, batch.block_table, batch.context_lens, *more)
        error = relative_error(kernel(*arguments), twin(*arguments))
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@DTYPES
def test_keys_and_values_are_rounded_into_their_slots(dtype: torch.dtype, device: str) -> None:
    qkv = torch.randn(4, 8 * 16, dtype=dtype, device=device) * 9
    slots = torch.tensor([0, 5, -1, 9], device=device)
    positions = torch.arange(4, dtype=torch.int32, device=device)
    cos_sin = torch.randn(4, 16, device=device)
    scale = torch.rand(4, device=device) + 0.5
    results = []
    for launch in (Launch(), TWINS):
        caches = [torch.zeros(2, 8, 2, 16, device=device).to(E4M3) for _ in "kv"]
        key_cache, value_cache = caches
        query = rope_kv_write(
            qkv.clone(), key_cache, value_cache, slots, 4, positions, cos_sin,
            launch=launch, row_scale=scale,
        )  # fmt: skip
        results.append([query, *caches])
    (query, *caches), (expected, *expected_caches) = results
    torch.testing.assert_close(query, expected, rtol=4e-2, atol=4e-2)
    for found, wanted in zip(caches, expected_caches, strict=True):
        check_e4m3(found, wanted)
