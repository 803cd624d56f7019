"""Every matrix product against the same in fp64, and which of them is taken for what."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from m5_kernels.decoder.linear import linear_torch
from m5_kernels.extras.devices import few_rows_linear as few_rows_file
from m5_kernels.extras.devices import hopper_device as device_file
from m5_kernels.extras.devices import hopper_linear as hopper_file
from m5_kernels.extras.devices.dot_linear import dot_linear
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear, should_use_hopper
from m5_kernels.extras.devices.few_rows_tiles import DotTile, dot_tile, fit_dot, hopper_tile
from m5_kernels.extras.devices.hopper_linear import hopper_linear
from m5_kernels.extras.devices.register_linear import register_linear
from m5_kernels.extras.quantization.hopper_int8 import hopper_int8
from m5_kernels.extras.quantization.hopper_int8_tiles import H200_INT8, HopperInt8Tile
from m5_kernels.extras.quantization.int8_linear import int8_linear
from m5_kernels.extras.quantization.int8_method import Int8Linear
from m5_kernels.extras.quantization.int8_tiles import Int8Tile
from m5_kernels.extras.quantization.int8_weight import Int8Weight, int8_linear_torch
from m5_kernels.kernels.gpu_tiles import GPU
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.pdl import EARLY, LATE, NEVER, supports_pdl
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.kernels.skinny_linear import skinny_linear
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.tools.measure import relative_error

pytestmark = pytest.mark.usefixtures("poisoned")
HAS_HOPPER = device_file.is_hopper(torch.device("cuda")) if torch.cuda.is_available() else False
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
ALL, HALVES = tuple(MAX_ERROR), (torch.float16, torch.bfloat16)
SMALL_MODEL = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
"""Weights of layers of Qwen3's 0.6B shape."""


@dataclass(frozen=True)
class Product:
    """A kernel, and what it takes."""

    multiply: Callable[..., torch.Tensor]
    counts: Sequence[int]
    """Numbers of rows."""
    dtypes: Sequence[torch.dtype]
    tile: Any = None
    """Under the interpreter."""
    can_gate: bool = True
    is_int8: bool = False
    company: int = 0
    """So many rows have the bits of fewer. (Of more the interpreter's sums have another order.)"""

    def __call__(
        self, hidden: torch.Tensor, weight: Any, bias: Any = None, is_gated: bool = False
    ) -> torch.Tensor:
        options = {"is_gated": is_gated} if self.can_gate else {}
        if self.tile and not hidden.is_cuda:
            options |= {"tile": self.tile}
        return self.multiply(hidden, weight, bias, **options)

    def weight(self, out_size: int, like: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """A random one for such rows, and what it stands for, in fp64."""
        numbers = torch.randn(out_size, like.shape[1], device=like.device) * like.shape[1] ** -0.5
        if not self.is_int8:
            return numbers.to(like.dtype), numbers.to(like.dtype).double()
        weight = Int8Weight.zeros(out_size, like.shape[1], like.device)
        weight.round_from(numbers)
        return weight, weight.integers.double() * weight.scale.double()[:, None]

    def check(
        self, sizes: Sequence[tuple[int, int]], is_gated: bool, dtype: torch.dtype, device: str
    ) -> None:
        """With a bias and without, for rows that are apart: the product in fp64."""
        for (size, in_size), num_tokens in itertools.product(sizes, self.counts):
            hidden = torch.randn(num_tokens, in_size + 8, dtype=dtype, device=device)[:, :in_size]
            weight, exact = self.weight(size * (1 + is_gated), hidden)
            for bias in (None, torch.randn(len(weight), dtype=dtype, device=device)):
                output = self(hidden, weight, bias, is_gated)
                wide: list[Any] = [
                    None if each is None else each.double() for each in (hidden, exact, bias)
                ]
                assert (output.dtype, output.shape) == (dtype, (num_tokens, size))
                exact_output = linear_torch(wide[0], wide[1], wide[2], is_gated)
                error = relative_error(output, exact_output)
                assert error < MAX_ERROR[dtype] * (1 + is_gated)  # which is rounded more often


def int8(*counts: int, tile: Any, company: int = 0) -> Product:
    """`int8_linear` with a tile of one of its kernels."""
    return Product(int8_linear, counts, ALL, tile, can_gate=False, is_int8=True, company=company)


PRODUCTS = {
    "skinny": Product(skinny_linear, [1], ALL, LinearTile(4, 64, 2)),
    "registers": Product(register_linear, [1, 3, 16], HALVES, LinearTile(16, 64, 2), company=8),
    "dot": Product(dot_linear, [1, 3, 16], HALVES, DotTile(16, 32, 4, 2), False, company=16),
    "int8, one row": int8(0, 1, tile=LinearTile(32, 128, 2)),
    "int8, some rows": int8(2, 4, tile=LinearTile(16, 64, 2), company=4),
    "int8, a tile": int8(5, tile=Int8Tile(32, 16, 64, 4, 2)),
    "int8, tiles": int8(35, tile=Int8Tile(16, 32, 128, 4, 2)),
    "int8, chosen": int8(3, tile=None),
    "int8, twin": Product(int8_linear_torch, [3], ALL, can_gate=False, is_int8=True),
    "hopper": Product(hopper_linear, [1, 17, 64, 65, 150, 193, 256], [torch.bfloat16], company=256),
}
GATED = pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])


def products(*names: str, gates: Sequence[bool] = (False, True)) -> pytest.MarkDecorator:
    """Marks a test of these, with all numbers that they take, and with a gate if they have one."""
    cases = []
    for name, dtype, is_gated in itertools.product(names, ALL, gates):
        if dtype in PRODUCTS[name].dtypes and (PRODUCTS[name].can_gate or not is_gated):
            # Triton's interpreter does not multiply matrices in bf16.
            is_interpreted = dtype != torch.bfloat16 or name == "skinny"
            marks = [] if is_interpreted else [pytest.mark.gpu]
            marks += [needs_hopper] if name == "hopper" else []
            # Quantization is an extra, as in `test_interpreted_kernels.py`.
            marks += [pytest.mark.slow] if PRODUCTS[name].is_int8 else []
            cases.append(pytest.param(name, dtype, is_gated, marks=marks))
    return pytest.mark.parametrize(("name", "dtype", "is_gated"), cases)


@products(*PRODUCTS)
def test_equals_the_product_in_fp64(
    name: str, dtype: torch.dtype, is_gated: bool, device: str
) -> None:
    sizes = [(5, 16), (19, 70), (32, 128)] if name != "hopper" else []  # whose rows are aligned
    if device == "cuda":
        sizes += [(8, 8), (504, 584), *((out_size // 2, n) for out_size, n in SMALL_MODEL)]
    PRODUCTS[name].check(sizes, is_gated, dtype, device)


@pytest.mark.gpu
@GATED
@pytest.mark.parametrize("in_size", [2560, 3584, 5120, 9728, 12288, 25600])
def test_the_tile_of_each_length(in_size: int, is_gated: bool) -> None:
    PRODUCTS["skinny"].check([(33, in_size)], is_gated, torch.bfloat16, "cuda")
    PRODUCTS["dot"].check([(6144, in_size)], False, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8, 16, 33, 64, 100, 256, 700, 4000])
def test_in_eight_bits_whatever_is_chosen_for_so_many_rows(num_tokens: int) -> None:
    multiply = Int8Linear().apply
    chosen = Product(multiply, [num_tokens], ALL, can_gate=False, is_int8=True)
    chosen.check([(6144, 1024), (1024, 3072), (4096, 4096)], False, torch.bfloat16, "cuda")


@products("registers", "dot", "int8, some rows", "hopper")
def test_a_row_gets_the_same_bits_in_any_company(
    name: str, dtype: torch.dtype, is_gated: bool, device: str
) -> None:
    product = PRODUCTS[name]
    for size, in_size in SMALL_MODEL if name == "hopper" else [(50, 300)]:
        hidden = torch.randn(product.company, in_size, dtype=dtype, device=device)
        weight, _ = product.weight(size, hidden)
        together = product(hidden, weight, None, is_gated)
        for num_tokens in (n for n in (1, 2, 3, 17, 64, 65, 130) if n < product.company):
            alone = product(hidden[:num_tokens], weight, None, is_gated)
            assert torch.equal(alone, together[:num_tokens])


@pytest.mark.gpu
@GATED
@pytest.mark.parametrize("size", [*SMALL_MODEL, (16384, 1024)])
def test_a_step_with_guesses_has_the_products_of_one_without(
    size: tuple[int, int], is_gated: bool
) -> None:
    """In bf16, where a weight is small or has many short rows."""
    if not supports_pdl(torch.device("cuda")):
        pytest.skip("this GPU has other kernels for one row and for several")
    hidden = torch.randn(16, size[1], dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(*size, dtype=torch.bfloat16, device="cuda")
    few = FewRowsLinear.on(hidden.device)
    multiply = few.gate_up if is_gated else few.apply
    together = multiply(hidden, weight)
    for num_tokens in (1, 2, 3, 4, 8, 9):
        alone = multiply(hidden[:num_tokens], weight, launch=Launch(EARLY))
        assert torch.equal(alone, together[:num_tokens])


@products("skinny", "registers", "hopper", gates=[True])
def test_numbers_are_rounded_where_silu_mul_rounds_them(
    name: str, dtype: torch.dtype, is_gated: bool, device: str
) -> None:
    product = PRODUCTS[name]
    for size, in_size in [(3072, 1024)] if name == "hopper" else [(8, 70), (5, 70), (1, 70)]:
        hidden = torch.randn(product.counts[-1], in_size, dtype=dtype, device=device)
        weight, _ = product.weight(2 * size, hidden)
        bias = torch.randn(2 * size, dtype=dtype, device=device)
        others = product(hidden, weight, bias, is_gated) != silu_mul(product(hidden, weight, bias))
        assert others.double().mean() <= (1e-3 if name == "hopper" else 0)


@pytest.mark.gpu
@needs_hopper
def test_rows_are_read_after_they_are_written() -> None:
    """By kernels that have just let this one start; a late row would have a round's numbers."""
    rounds = [torch.randn(256, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(20)]
    weight = torch.randn(1024, 2048, dtype=torch.bfloat16, device="cuda") / 45
    expected = [hopper_linear(silu_mul_torch(each), weight) for each in rounds]
    late = Launch(LATE)
    found = [hopper_linear(silu_mul(each, late), weight, launch=late) for each in rounds]
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tile", H200_INT8, ids=str)
@GATED
@pytest.mark.parametrize("size", [(528, 576), (1008, 4096), (20000, 320)])
def test_in_eight_bits_whoever_is_last_adds_the_same_parts(
    tile: HopperInt8Tile, size: tuple[int, int], is_gated: bool
) -> None:
    """In the same order, and leaves all as it was."""
    for num_tokens in (tile.rows - 3, 2 * tile.rows + 8):
        hidden = torch.randn(num_tokens, size[1], dtype=torch.bfloat16, device="cuda")
        weight, exact = PRODUCTS["int8, chosen"].weight(size[0], hidden)
        bias = torch.randn(size[0], dtype=torch.bfloat16, device="cuda")
        expected = linear_torch(hidden.double(), exact, bias.double(), is_gated)
        for num_parts in (1, 2, 3) if size[0] < 4096 else (1,):
            split = tile._replace(num_parts=num_parts)
            found = []
            for pdl in (NEVER, LATE) * 8:
                found.append(hopper_int8(hidden, weight, bias, is_gated, split, Launch(pdl)))
            assert relative_error(found[0], expected) < MAX_ERROR[torch.bfloat16]
            assert all(torch.equal(each, found[0]) for each in found)
            assert not weight.arrivals.any()


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


# --- without running them -------------------------------------------------------------------------


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("counts", "size", "dtype", "taken"),
    [
        ([1, 16], (4096, 1024), BF16, "register_linear"),
        ([17, 256], (4096, 1024), BF16, "hopper_linear"),
        ([2, 16], (6144, 4096), BF16, "dot_linear"),
        # The library's, or of one row `skinny_linear`:
        ([0, 257], (4096, 1024), BF16, None),
        ([1, 64], (4096, 1024), torch.float32, None),
        ([64], (4096, 1024), torch.float16, None),
        ([64], (4096, 1020), BF16, None),  # rows of the weight begin anywhere
        ([64], (4095, 1024), BF16, None),  # rows of the output begin anywhere
    ],
)
def test_which_product_is_taken_on_hopper(
    counts: list[int], size: Any, dtype: torch.dtype, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in itertools.product(
        (device_file, few_rows_file), ("is_hopper", "supports_pdl")
    ):
        monkeypatch.setattr(module, name, lambda device: True)
    launched: list[str] = []
    for module, name in (
        (few_rows_file, "register_linear"),
        (few_rows_file, "dot_linear"),
        (hopper_file, "hopper_linear"),
    ):
        note = lambda *args, name=name, **options: launched.append(name)  # noqa: E731
        monkeypatch.setattr(module, name, note)
    linear = replace(FewRowsLinear.on(torch.device("cuda")), one_row=None)
    weight = torch.empty(size, dtype=dtype, device="meta")
    for num_tokens in counts:
        hidden = torch.empty(num_tokens, size[1], dtype=dtype, device="meta")
        launched.clear()
        linear.apply(hidden, weight)
        assert launched == ([taken] if taken else []), num_tokens
    rows, narrow = (torch.empty(n, 1024, dtype=BF16, device="meta") for n in (64, 24))
    assert should_use_hopper(rows, narrow, 24)
    assert not should_use_hopper(rows, narrow, 12), "gated, a row has 12 outputs"


@GATED
@pytest.mark.parametrize("num_tokens", [17, 64, 65, 130, 256])
@pytest.mark.parametrize("size", [8, 1024, 3072, 4096, 8192])
def test_tiles_for_hopper_fit(num_tokens: int, size: int, is_gated: bool) -> None:
    tile = hopper_tile(num_tokens, size, is_gated)
    width = tile.columns * (2 if is_gated else 1)
    program_bytes = 2 * (tile.num_stages * (64 + width) * tile.depth + 64 * tile.columns) + 2048
    programs = -(-num_tokens // 64) * -(-size // tile.columns)
    assert program_bytes * (1 if programs <= 132 else 2) <= 228 * 1024
    assert tile.num_stages >= 4


def test_tiles_of_few_rows_fit_gpus_with_less_shared_memory() -> None:
    tile = dot_tile(4096, torch.device("cpu"))._replace(num_stages=6)
    for kib, num_stages in ((227, 6), (99, 4), (64, 3)):
        gpu = GPU(kib * 1024, kib * 1024, 65536, 32)
        assert fit_dot(tile, gpu).num_stages == num_stages
