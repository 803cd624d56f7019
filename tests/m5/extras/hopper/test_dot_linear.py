"""The matrix product of up to 16 rows on tensor cores against its twin."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.decoder.products import Products, linear_torch
from m5_kernels.extras.hopper.dot_linear import dot_linear
from m5_kernels.extras.hopper.products import DotProduct, products_of_few_rows
from m5_kernels.extras.hopper.tiles import DotTile, dot_tile, fit_dot
from m5_kernels.kernels.tiles import GPU
from m5_kernels.tools.measure import relative_error

MAX_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
TILE = DotTile(16, 32, 4, 2)


@pytest.fixture(params=MAX_ERROR, ids=str)
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if device == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter does not multiply matrices in bf16")
    return request.param


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.parametrize(
    ("out_size", "in_size"),
    [(1, 16), (37, 70), (64, 128), pytest.param(6144, 4096, marks=pytest.mark.gpu)],
)
def test_equals_the_library(
    num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype, device: str
) -> None:
    hidden = torch.randn(num_tokens, in_size + 8, dtype=dtype, device=device)[:, :in_size]
    weight = torch.randn(out_size, in_size, dtype=dtype, device=device)
    for bias in (None, torch.randn(out_size, dtype=dtype, device=device)):
        tile = TILE if device == "cpu" else None
        output = dot_linear(hidden, weight, bias, tile)
        exact = linear_torch(
            hidden.double(), weight.double(), None if bias is None else bias.double()
        )
        assert output.dtype == dtype
        assert relative_error(output, exact) < MAX_ERROR[dtype]


def test_a_row_gets_the_same_bits_in_any_company(dtype: torch.dtype, device: str) -> None:
    hidden = torch.randn(16, 300, dtype=dtype, device=device)
    weight = torch.randn(50, 300, dtype=dtype, device=device)
    together = dot_linear(hidden, weight, tile=TILE)
    for num_tokens in (1, 2, 4, 9):
        assert torch.equal(
            dot_linear(hidden[:num_tokens], weight, tile=TILE), together[:num_tokens]
        )


@pytest.mark.gpu
def test_a_step_with_guesses_has_the_products_of_one_without() -> None:
    """In bf16, where a weight has many short rows."""
    weight = torch.randn(16384, 1024, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(16, 1024, dtype=torch.bfloat16, device="cuda")
    linear = Products(products_of_few_rows(hidden.device)).linear
    assert torch.equal(linear(hidden, weight)[:1], linear(hidden[:1], weight))


def test_it_is_taken_where_it_was_the_fastest() -> None:
    """Qwen3's shapes at 1, 4, 16 and 17 rows: 0.6B's short rows, its small weights, 8B's."""

    def taken(*size: int) -> list[bool]:
        weight, *hidden = (
            torch.empty(n, size[1], dtype=torch.bfloat16, device="meta")
            for n in (size[0], 1, 4, 16, 17)
        )
        return [DotProduct().suits(rows, weight, is_gated=False) for rows in hidden]

    assert taken(6144, 1024) == [True, True, True, False]
    assert taken(1024, 3072) == taken(6144, 4096) == [False, True, True, False]


def test_tiles_fit_gpus_with_less_shared_memory() -> None:
    tile = dot_tile(4096, torch.device("cpu"))._replace(num_stages=6)
    for kib, num_stages in ((227, 6), (99, 4), (64, 3)):
        gpu = GPU(kib * 1024, kib * 1024, 65536, 32)
        assert fit_dot(tile, gpu).num_stages == num_stages
