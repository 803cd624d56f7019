"""The matrix product for one row against its twin."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.decoder.products import linear_torch
from m5_kernels.kernels.silu_mul import silu_mul
from m5_kernels.kernels.skinny_linear import skinny_linear
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.tools.measure import relative_error

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize(
    ("out_size", "in_size"),
    [(1, 1), (5, 70), (8, 128), pytest.param(6144, 1024, marks=pytest.mark.gpu)],
)
def test_equals_the_library(out_size: int, in_size: int, dtype: torch.dtype, device: str) -> None:
    hidden = torch.randn(1, in_size, dtype=dtype, device=device)
    weight = torch.randn(out_size, in_size, dtype=dtype, device=device)
    for bias in (None, torch.randn(out_size, dtype=dtype, device=device)):
        output = skinny_linear(hidden, weight, bias, tile=LinearTile(4, 64, 2))
        expected = linear_torch(
            hidden.double(), weight.double(), None if bias is None else bias.double()
        )
        assert output.dtype == dtype
        assert relative_error(output, expected) < MAX_ERROR[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("in_size", [2560, 3584, 5120, 9728, 25600])
def test_the_tile_of_each_length(in_size: int) -> None:
    hidden = torch.randn(1, in_size, device="cuda").bfloat16()
    weight = torch.randn(66, in_size, device="cuda").bfloat16()
    for is_gated in (False, True):
        found = skinny_linear(hidden, weight, None, is_gated)
        exact = linear_torch(hidden.double(), weight.double(), None, is_gated)
        assert relative_error(found, exact) < MAX_ERROR[torch.bfloat16]


@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize("size", [8, 5, 1])
def test_with_a_gate_it_has_the_bits_of_silu_mul(
    size: int, dtype: torch.dtype, device: str
) -> None:
    hidden = torch.randn(1, 70, dtype=dtype, device=device)
    weight = torch.randn(2 * size, 70, dtype=dtype, device=device)
    bias, tile = torch.randn(2 * size, dtype=dtype, device=device), LinearTile(4, 64, 2)
    together = skinny_linear(hidden, weight, bias, is_gated=True, tile=tile)
    assert torch.equal(together, silu_mul(skinny_linear(hidden, weight, bias, tile=tile)))
