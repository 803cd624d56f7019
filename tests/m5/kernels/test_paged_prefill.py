"""Prefill over block tables against its twin: whole prompts, chunks and single tokens mixed."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.kernels.paged_prefill import paged_prefill, paged_prefill_torch
from m5_kernels.kernels.tiles import PrefillTile
from m5_kernels.tools.measure import PagedBatch, relative_error

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL = PrefillTile(16, 16, 2, 2)


def check(
    context_lens: list[int],
    query_lens: list[int],
    device: str,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    tile: PrefillTile | None = SMALL,
) -> None:
    batch = PagedBatch.random(
        context_lens, query_lens, num_q_heads, num_kv_heads, head_dim, block_size, dtype, device
    )
    for seq, length in enumerate(context_lens):
        if length % block_size:
            last = int(batch.block_table[seq, length // block_size])
            batch.key_cache[last, length % block_size :] = torch.nan
            batch.value_cache[last, length % block_size :] = torch.nan
    arguments = (
        batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.context_lens,
        batch.query_start_loc,
    )  # fmt: skip
    expected = paged_prefill_torch(*arguments, window=window)
    output = torch.full_like(batch.query, torch.nan)
    paged_prefill(*arguments, window=window, output=output, tile=tile)
    assert relative_error(output, expected) < MAX_ERROR[dtype]


@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [
        ([1], [1]),
        ([50], [50]),
        ([50], [13]),
        ([40, 7, 33], [40, 1, 17]),
        ([5, 60, 20, 1], [5, 0, 20, 1]),
        ([16, 32, 48], [16, 16, 48]),
    ],
    ids=str,
)
def test_whole_prompts_chunks_and_single_tokens(
    context_lens: list[int], query_lens: list[int], device: str
) -> None:
    check(context_lens, query_lens, device, 2, 1)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_query_heads_per_kv_head(group: int, device: str) -> None:
    check([12, 9], [12, 4], device, group, 1)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, device: str) -> None:
    check([20, 3], [20, 2], device, 2, 1, head_dim=head_dim)


@pytest.mark.parametrize("block_size", [1, 3, 48, 256])
def test_block_size_is_independent_of_the_tile(block_size: int, device: str) -> None:
    check([40, 17], [10, 17], device, 2, 1, block_size=block_size)


@pytest.mark.parametrize("window", [1, 7, 16, 1000])
def test_sliding_window(window: int, device: str) -> None:
    check([40, 19], [12, 19], device, 2, 1, window=window)


# The interpreter multiplies the bits of bf16 matrices as if they were integers.
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    check([30, 23], [30, 5], device, 2, 1, dtype=dtype)


def test_tail_of_a_mixed_step_leaves_decode_rows_alone(device: str) -> None:
    batch = PagedBatch.random([30, 20, 25], [1, 1, 12], 4, 2, 64, 16, torch.float32, device)
    tables = (batch.block_table[2:], batch.context_lens[2:], batch.query_start_loc[2:])
    caches = (batch.key_cache, batch.value_cache)
    output = torch.full_like(batch.query, torch.nan)
    paged_prefill(batch.query, *caches, *tables, output=output, tile=SMALL)
    expected = paged_prefill_torch(batch.query, *caches, *tables)
    assert output[:2].isnan().all()
    assert relative_error(output[2:], expected[2:]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_large_mixed_batch(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    lens, chunks = [700, 1, 2000, 64, 1500], [700, 1, 512, 64, 3]
    check(lens, chunks, "cuda", 16, 8, head_dim, 16, dtype, window, tile=None)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("block_size", [1, 100, 256])
def test_large_block_sizes_and_groups(block_size: int, group: int) -> None:
    check([900, 333], [900, 100], "cuda", 2 * group, 2, 128, block_size, torch.bfloat16, tile=None)
