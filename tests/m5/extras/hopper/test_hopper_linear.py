"""Products of 17 to 256 rows on Hopper against their twin; whom they take, with which tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from m5_kernels.compiled_shapes import shapes_of_all_kernels
from m5_kernels.decoder.products import linear_torch
from m5_kernels.extras.hopper import device as device_file
from m5_kernels.extras.hopper.products import HopperProduct
from m5_kernels.extras.hopper.tiles import HopperTile, hopper_tile
from m5_kernels.kernels.backend import HAS_TRITON
from m5_kernels.kernels.early_start import LATE, next_starts
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.tools.measure import relative_error

if HAS_TRITON:
    from m5_kernels.extras.hopper.hopper_linear import hopper_linear

HAS_HOPPER = device_file.is_hopper(torch.device("cuda")) if torch.cuda.is_available() else False
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
GATED = pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
QWEN3 = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
"""Weights of layers of the 0.6B shape."""


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned")
@GATED
@pytest.mark.parametrize("num_tokens", [1, 17, 64, 65, 150, 193, 256])
@pytest.mark.parametrize(("out_size", "in_size"), [*QWEN3, (1008, 584), (16, 8)])
def test_equals_the_twin(num_tokens: int, out_size: int, in_size: int, is_gated: bool) -> None:
    hidden = random_bf16(num_tokens, in_size + 8)[:, :in_size]
    weight = random_bf16(out_size, in_size) * in_size**-0.5
    for bias in (None, random_bf16(out_size)):
        inputs = [None if each is None else each.double() for each in (hidden, weight, bias)]
        output = hopper_linear(hidden, weight, bias, is_gated)
        assert relative_error(output, linear_torch(*inputs, is_gated)) < 1e-2


@pytest.mark.gpu
@needs_hopper
@GATED
@pytest.mark.parametrize(("out_size", "in_size"), QWEN3)
def test_a_row_gets_the_same_bits_in_any_company(
    out_size: int, in_size: int, is_gated: bool
) -> None:
    hidden, weight = random_bf16(256, in_size), random_bf16(out_size, in_size)
    together = hopper_linear(hidden, weight, None, is_gated)
    for num_tokens in (17, 64, 65, 130):
        alone = hopper_linear(hidden[:num_tokens], weight, None, is_gated)
        assert torch.equal(alone, together[:num_tokens])


@pytest.mark.gpu
@needs_hopper
def test_rows_are_read_after_they_are_written() -> None:
    """By kernels that have just let this one start; a late row would have a round's numbers."""
    weight, size = random_bf16(1024, 2048) / 45, 2048
    rounds = [random_bf16(256, 2 * size) for _ in range(20)]
    expected = [hopper_linear(silu_mul_torch(each), weight) for each in rounds]
    with next_starts(LATE):
        found = [hopper_linear(silu_mul(each), weight) for each in rounds]
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@needs_hopper
def test_numbers_are_rounded_where_silu_mul_rounds_them() -> None:
    hidden, weight = random_bf16(70, 1024), random_bf16(6144, 1024) / 32
    apart = silu_mul(hopper_linear(hidden, weight))
    found = hopper_linear(hidden, weight, is_gated=True)
    assert (found != apart).double().mean() < 1e-3


def test_which_products_go_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes(num_tokens: int, out_size: int, in_size: int, **options: Any) -> bool:
        options = {"dtype": torch.bfloat16, "device": "meta"} | options
        hidden, weight = (torch.empty(n, in_size, **options) for n in (num_tokens, out_size))
        return HopperProduct().suits(hidden, weight, is_gated=False)

    assert not goes(64, 4096, 1024)
    monkeypatch.setattr(device_file, "is_hopper", lambda device: True)
    assert [goes(num_tokens, 4096, 1024) for num_tokens in (16, 17, 256, 257)] == [0, 1, 1, 0]
    assert all(goes(64, *size) for size in QWEN3)
    assert not goes(64, 4096, 4096), "the library's turn"
    assert not goes(64, 4096, 1020), "rows of the weight begin anywhere"
    assert not goes(64, 4095, 1024), "rows of the output begin anywhere"
    assert not goes(64, 4096, 1024, dtype=torch.float16)
    hidden = torch.empty(64, 1024, dtype=torch.bfloat16)
    weight = torch.empty(24, 1024, dtype=torch.bfloat16)
    assert HopperProduct().suits(hidden, weight, is_gated=False)
    assert not HopperProduct().suits(hidden, weight, is_gated=True), "12 outputs a row"


@GATED
@pytest.mark.parametrize("num_tokens", [17, 64, 65, 130, 256])
@pytest.mark.parametrize("size", [8, 1024, 3072, 4096, 8192])
def test_tiles_fit(num_tokens: int, size: int, is_gated: bool) -> None:
    tile = hopper_tile(num_tokens, size, is_gated)
    width = tile.columns * (2 if is_gated else 1)
    program_bytes = 2 * (tile.num_stages * (64 + width) * tile.depth + 64 * tile.columns) + 2048
    programs = -(-num_tokens // 64) * -(-size // tile.columns)
    assert program_bytes * (1 if programs <= 132 else 2) <= 228 * 1024
    assert tile.num_stages >= 4


@pytest.mark.parametrize("max_num_seqs", [1, 24, 150, 256])
@pytest.mark.parametrize("max_tokens", [64, 100, 150, 2048])
def test_each_tile_is_compiled_before_the_first_request(max_num_seqs: int, max_tokens: int) -> None:
    def tiles(counts: set[int]) -> set[tuple[bool, int, HopperTile]]:
        taken = (n for n in counts if 16 < n <= 256)
        sizes = [(False, 4096), (False, 1024), (True, 3072)]
        return {(g, size, hopper_tile(n, size, g)) for n in taken for g, size in sizes}

    counts = HopperProduct().token_counts(max_tokens, [])
    shapes = shapes_of_all_kernels(max_num_seqs, max_tokens, counts)
    compiled = {shape.num_tokens for shape, _ in shapes}
    most = max(max_num_seqs, max_tokens)
    assert max(compiled - {3073}) <= most
    assert tiles(compiled) == tiles(set(range(1, most + 1)))
