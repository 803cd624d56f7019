"""The matrix product of up to 16 rows, with its weight in registers, against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from m5_kernels.decoder.products import Products, linear_torch
from m5_kernels.extras.hopper.products import RegisterProduct, products_of_few_rows, takes_registers
from m5_kernels.extras.hopper.register_linear import MAX_TOKENS, fits_registers, register_linear
from m5_kernels.kernels.early_start import EARLY, next_starts, supports_early_starts
from m5_kernels.kernels.silu_mul import silu_mul
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.tools.measure import relative_error

MAX_ERROR = {torch.float16: 4e-3, torch.bfloat16: 1e-2}
TILE = LinearTile(16, 64, 2)
GATED = pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
QWEN3 = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096), (4096, 12288)]
"""Weights of layers of the 0.6B shape, then of the 8B shape."""


def on_gpu(sizes: list[tuple[int, int]]) -> list[Any]:
    return [pytest.param(*each, marks=pytest.mark.gpu) for each in sizes]


@pytest.fixture(params=MAX_ERROR, ids=str)
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if device == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter does not multiply matrices in bf16")
    return request.param


@GATED
@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.parametrize(
    ("out_size", "in_size"), [(20, 16), (38, 70), (64, 128), *on_gpu([*QWEN3[:4], (1000, 576)])]
)
def test_equals_the_twin(
    num_tokens: int, out_size: int, in_size: int, is_gated: bool, dtype: torch.dtype, device: str
) -> None:
    hidden = torch.randn(num_tokens, in_size + 8, dtype=dtype, device=device)[:, :in_size]
    weight = torch.randn(out_size, in_size, dtype=dtype, device=device) * in_size**-0.5
    for bias in (None, torch.randn(out_size, dtype=dtype, device=device)):
        inputs = [None if each is None else each.double() for each in (hidden, weight, bias)]
        tile = TILE if device == "cpu" else None
        output = register_linear(hidden, weight, bias, is_gated, tile)
        assert output.dtype == dtype
        assert output.shape == (num_tokens, out_size // 2 if is_gated else out_size)
        assert relative_error(output, linear_torch(*inputs, is_gated)) < MAX_ERROR[dtype]


@GATED
def test_a_row_gets_the_same_bits_in_any_company(
    is_gated: bool, dtype: torch.dtype, device: str
) -> None:
    # Under the interpreter the order is numpy's, which depends on the number of padded rows.
    hidden = torch.randn(16 if device == "cuda" else 8, 300, dtype=dtype, device=device)
    weight = torch.randn(50, 300, dtype=dtype, device=device)
    together = register_linear(hidden, weight, None, is_gated, TILE)
    for num_tokens in (1, 2, 4, len(hidden) - 1):
        alone = register_linear(hidden[:num_tokens], weight, None, is_gated, TILE)
        assert torch.equal(alone, together[:num_tokens])


@pytest.mark.gpu
@GATED
@pytest.mark.parametrize(("out_size", "in_size"), QWEN3[:4])
def test_a_step_with_guesses_has_the_products_of_one_without(
    out_size: int, in_size: int, is_gated: bool
) -> None:
    if not supports_early_starts(torch.device("cuda")):
        pytest.skip("this GPU has other kernels for one row and for several")
    weight = torch.randn(out_size, in_size, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(MAX_TOKENS, in_size, dtype=torch.bfloat16, device="cuda")
    products = Products(products_of_few_rows(hidden.device))
    multiply = products.gate_up if is_gated else products.linear
    together = multiply(hidden, weight)
    for num_tokens in (1, 2, 3, 4, 8, 9):
        with next_starts(EARLY):
            alone = multiply(hidden[:num_tokens], weight)
        assert torch.equal(alone, together[:num_tokens])


def test_numbers_are_rounded_where_silu_mul_rounds_them(dtype: torch.dtype, device: str) -> None:
    hidden = torch.randn(3, 128, dtype=dtype, device=device)
    weight = torch.randn(64, 128, dtype=dtype, device=device)
    apart = silu_mul(register_linear(hidden, weight, None, False, TILE))
    assert torch.equal(register_linear(hidden, weight, None, True, TILE), apart)


def test_few_rows_in_two_bytes_go_this_way(device: str) -> None:
    weight = torch.randn(40, 96, dtype=torch.float16, device=device)
    hidden = torch.randn(17, 96, dtype=torch.float16, device=device)
    is_here = supports_early_starts(hidden.device)
    products = products_of_few_rows(hidden.device)
    assert any(isinstance(each, RegisterProduct) for each in products) == is_here
    for num_tokens, is_taken in ((0, False), (1, True), (16, True), (17, False)):
        assert takes_registers(num_tokens, weight) == is_taken
    assert not takes_registers(1, weight.float())
    gate_up = Products(products).gate_up
    for num_tokens in (0, 1, 17):
        expected = linear_torch(hidden[:num_tokens].double(), weight.double(), is_gated=True)
        found = gate_up(hidden[:num_tokens], weight)
        assert relative_error(found, expected) < MAX_ERROR[torch.float16]


def test_which_weights_are_small() -> None:
    """Those of the layers of Qwen3's 0.6B shape; but neither its LM head nor those of 8B."""
    taken = [fits_registers(*size) for size in QWEN3]
    assert taken == [True] * 4 + [False] * 2
    assert not fits_registers(151936, 1024)
    assert not fits_registers(64, 4096)
