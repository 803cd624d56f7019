"""The matrix product for a few rows against its twin."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.kernels.linear import linear_torch
from m5_kernels.kernels.silu_mul import silu_mul
from m5_kernels.kernels.skinny_linear import skinny_linear
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.tools.measure import relative_error

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("out_size", "in_size"),
    [(1, 1), (5, 70), (8, 128), pytest.param(6144, 1024, marks=pytest.mark.gpu)],
)
def test_equals_the_library(
    num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, device: str
) -> None:
    hidden = torch.randn(num_tokens, in_size, dtype=dtype, device=device)
    weight = torch.randn(out_size, in_size, dtype=dtype, device=device)
    for bias in (None, torch.randn(out_size, dtype=dtype, device=device)):
        output = skinny_linear(hidden, weight, bias, tile=LinearTile(4, 64, 2))
        expected = linear_torch(
            hidden.double(), weight.double(), None if bias is None else bias.double()
        )
        assert output.dtype == dtype
        assert relative_error(output, expected) < MAX_ERROR[dtype]


def test_rows_may_be_apart(device: str) -> None:
    wide, weight = torch.randn(2, 100, device=device), torch.randn(7, 30, device=device)
    output = skinny_linear(wide[:, 20:50], weight)
    assert relative_error(output, wide[:, 20:50] @ weight.T) < 1e-5


@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
def test_a_row_gets_the_same_bits_in_any_company(dtype: torch.dtype, device: str) -> None:
    hidden = torch.randn(4, 300, dtype=dtype, device=device)
    weight = torch.randn(5, 300, dtype=dtype, device=device)
    tile = LinearTile(2, 64, 4)
    alone = torch.cat([skinny_linear(row[None], weight, tile=tile) for row in hidden])
    for num_tokens in (2, 3, 4):
        together = skinny_linear(hidden[:num_tokens], weight, tile=tile)
        assert torch.equal(together, alone[:num_tokens])


@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (3, 5), (4, 1)])
def test_with_a_gate_it_has_the_bits_of_silu_mul(
    num_tokens: int, size: int, dtype: torch.dtype, device: str
) -> None:
    hidden = torch.randn(num_tokens, 70, dtype=dtype, device=device)
    weight = torch.randn(2 * size, 70, dtype=dtype, device=device)
    bias, tile = torch.randn(2 * size, dtype=dtype, device=device), LinearTile(4, 64, 2)
    together = skinny_linear(hidden, weight, bias, is_gated=True, tile=tile)
    assert torch.equal(together, silu_mul(skinny_linear(hidden, weight, bias, tile=tile)))
