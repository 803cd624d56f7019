"""Products with weights in eight bits against their twin, and the twin against arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from m5_kernels.decoder.products import Products
from m5_kernels.extras.int8.hopper_int8_tiles import H200_INT8, HopperInt8Tile
from m5_kernels.extras.int8.int8_linear import int8_linear, max_int8_tokens
from m5_kernels.extras.int8.int8_weight import Int8Weight, int8_linear_torch
from m5_kernels.extras.int8.products import int8_products
from m5_kernels.extras.int8.tiles import Int8Tile
from m5_kernels.kernels.backend import HAS_TRITON, runs_triton
from m5_kernels.kernels.early_start import LATE, NEVER, next_starts
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.tools.measure import relative_error

if HAS_TRITON:
    from m5_kernels.extras.int8.hopper_int8 import hopper_int8

pytestmark = pytest.mark.usefixtures("poisoned")
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),  # of which the interpreter has no products
]
SIZES = [(1, 1), (33, 70), (20, 192), pytest.param(6144, 1024, marks=pytest.mark.gpu)]


def random_weight(out_size: int, in_size: int, device: str) -> tuple[Int8Weight, torch.Tensor]:
    """A matrix in eight bits, and what it stands for, in float64."""
    weight = Int8Weight.zeros(out_size, in_size, device)
    weight.round_from(torch.randn(out_size, in_size))
    return weight, weight.integers.double() * weight.scale.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tile", "num_tokens"),
    [
        (LinearTile(32, 128, 2), 1),
        (LinearTile(16, 64, 2), 4),
        (Int8Tile(32, 16, 64, 4, 2), 5),
        (Int8Tile(16, 32, 128, 4, 2), 35),
        (None, 0),
        (None, 3),
    ],
)
@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_a_product_is_that_of_scale_times_integers(
    out_size: int, in_size: int, tile: Any, num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    weight, exact = random_weight(out_size, in_size, device)
    hidden = torch.randn(num_tokens, in_size, dtype=dtype, device=device)
    for bias in (None, torch.randn(out_size, dtype=dtype, device=device)):
        expected = hidden.double() @ exact.T + (0 if bias is None else bias.double())
        for found in (
            int8_linear(hidden, weight, bias, tile),
            int8_linear_torch(hidden, weight, bias),
        ):
            assert found.dtype == dtype
            assert relative_error(found, expected) < MAX_ERROR[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8, 16, 33, 64, 100, 256, 700, 4000])
@pytest.mark.parametrize(("out_size", "in_size"), [(6144, 1024), (1024, 3072), (4096, 4096)])
def test_whatever_is_chosen_for_so_many_rows(num_tokens: int, out_size: int, in_size: int) -> None:
    weight, exact = random_weight(out_size, in_size, "cuda")
    hidden = torch.randn(num_tokens, in_size, dtype=torch.bfloat16, device="cuda")
    found = Products(int8_products(hidden.device)).linear(hidden, weight)
    assert relative_error(found, hidden.double() @ exact.T) < MAX_ERROR[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", H200_INT8, ids=str)
@pytest.mark.parametrize("is_gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("out_size", "in_size"), [(528, 576), (1008, 4096), (20000, 320)])
def test_tiles_and_parts_for_hopper(
    tile: HopperInt8Tile, out_size: int, in_size: int, is_gated: bool
) -> None:
    """Whoever is last adds the same parts in the same order, and leaves all as it was."""
    weight, exact = random_weight(out_size, in_size, "cuda")
    for num_tokens in (tile.rows - 3, 2 * tile.rows + 8):
        hidden = torch.randn(num_tokens, in_size, dtype=torch.bfloat16, device="cuda")
        bias = torch.randn(out_size, dtype=torch.bfloat16, device="cuda")
        expected = hidden.double() @ exact.T + bias.double()
        if is_gated:
            expected = silu_mul_torch(expected)
        for num_parts in (1, 2, 3) if out_size < 4096 else (1,):
            split = tile._replace(num_parts=num_parts)
            found = []
            for when in (NEVER, LATE) * 8:
                with next_starts(when):
                    found.append(hopper_int8(hidden, weight, bias, is_gated, split))
            assert relative_error(found[0], expected) < MAX_ERROR[torch.bfloat16]
            assert all(torch.equal(each, found[0]) for each in found)
            assert not weight.arrivals.any()


def test_rows_may_be_apart(device: str) -> None:
    wide = torch.randn(9, 100, device=device)
    weight, exact = random_weight(7, 30, device)
    for num_tokens in (2, 9):
        part = wide[:num_tokens, 20:50]
        assert relative_error(int8_linear(part, weight), part.double() @ exact.T) < 1e-5


def test_a_row_gets_the_same_bits_in_any_company(device: str) -> None:
    hidden = torch.randn(4, 300, device=device)
    if not runs_triton(hidden):
        pytest.skip("the twin is the library's product, which promises nothing of the kind")
    weight, tile = random_weight(20, 300, device)[0], LinearTile(16, 128, 4)
    alone = torch.cat([int8_linear(row[None], weight, tile=tile) for row in hidden])
    for num_tokens in (2, 3, 4):
        together = int8_linear(hidden[:num_tokens], weight, tile=tile)
        assert torch.equal(together, alone[:num_tokens])


def test_up_to_how_many_rows_registers_are_quicker() -> None:
    """Small matrices, Qwen3-0.6B's LM head of many short rows, large ones."""
    assert max_int8_tokens(6144, 1024) == max_int8_tokens(1024, 3072) == 4
    assert max_int8_tokens(151936, 1024) == 0
    assert max_int8_tokens(24576, 4096) == max_int8_tokens(2048, 6144) == 1


def test_every_integer_arrives(device: str) -> None:
    """Through each kernel, all of them in each place of a word."""
    rows = torch.arange(-127.0, 129).clamp(max=127).view(2, 128).T.contiguous().view(4, 64)
    rows = torch.cat([rows.roll(shift, 1) for shift in (0, 16, 32, 48)])
    rows = torch.cat((torch.full((16, 64), 127.0), rows), 1)
    weight = Int8Weight.zeros(16, 128, device)
    weight.round_from(rows)
    assert torch.equal(weight.scale.cpu(), torch.ones(16))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    unit = torch.eye(128, dtype=dtype, device=device)
    found = int8_linear(unit, weight, tile=Int8Tile(16, 64, 64, 4, 2))
    assert torch.equal(found.T.float().cpu(), rows)
    for first in range(64, 128, 4):
        four = int8_linear(unit[first : first + 4], weight, tile=LinearTile(16, 128, 2))
        assert torch.equal(four.T.float().cpu(), rows[:, first : first + 4])
