"""Flash-Decoding and prefill over block tables against their twins: any mix of lengths, heads,
block sizes, splits and windows. What no token was written to holds NaN (`PagedBatch`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from m5_kernels.kernels.flash_decode import (
    DecodeWorkspace,
    flash_decode,
    flash_decode_torch,
    has_many_tiles,
    sets_of_kv_head,
)
from m5_kernels.kernels.paged_prefill import paged_prefill, paged_prefill_torch
from m5_kernels.kernels.tiles import DecodeTile, PrefillTile
from m5_kernels.tools.measure import PagedBatch, relative_error

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL = PrefillTile(16, 16, 2, 2)


def check_decode(
    context_lens: list[int],
    device: str,
    window: int | None = None,
    tile: DecodeTile | None = None,
    launches: int = 1,
    has_sinks: bool = False,
    **sizes: Any,
) -> None:
    batch = random_batch(context_lens, [1] * len(context_lens), device, **sizes)
    sinks = sinks_of(batch, has_sinks)
    workspace = workspace_of(batch, tile)
    workspace.partial_output.fill_(torch.nan)
    workspace.partial_lse.fill_(torch.nan)
    expected = flash_decode_torch(*batch.decode_inputs, window=window, sinks=sinks)
    outputs = []
    for _ in range(launches):
        outputs.append(torch.full_like(batch.query, torch.nan))
        flash_decode(
            *batch.decode_inputs, window=window, output=outputs[-1], workspace=workspace,
            sinks=sinks,
        )  # fmt: skip
        assert not workspace.arrivals.any(), "the next launch would wait for nobody"
    assert relative_error(outputs[0], expected) < MAX_ERROR[expected.dtype]
    assert not outputs[0][batch.context_lens == 0].any(), "padding"
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0]), "the order of arrival shows"


def check_prefill(
    context_lens: list[int],
    query_lens: list[int],
    device: str,
    window: int | None = None,
    tile: PrefillTile | None = SMALL,
    has_sinks: bool = False,
    **sizes: Any,
) -> None:
    batch = random_batch(context_lens, query_lens, device, **sizes)
    arguments = *batch.decode_inputs, batch.query_start_loc
    output = torch.full_like(batch.query, torch.nan)
    sinks = sinks_of(batch, has_sinks)
    paged_prefill(*arguments, window=window, output=output, tile=tile, sinks=sinks)
    expected = paged_prefill_torch(*arguments, window=window, sinks=sinks)
    assert relative_error(output, expected) < MAX_ERROR[expected.dtype]


def sinks_of(batch: PagedBatch, has_sinks: bool) -> torch.Tensor | None:
    """Sinks that take a part of the weight: of the first head nearly all."""
    num_heads, device = batch.query.shape[1], batch.query.device
    return torch.linspace(9, -1, num_heads, device=device) if has_sinks else None


def random_batch(
    context_lens: list[int],
    query_lens: list[int],
    device: str,
    num_q_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> PagedBatch:
    sizes = num_q_heads, num_kv_heads, head_dim, block_size, dtype, device
    return PagedBatch.random(context_lens, query_lens, *sizes)


def workspace_of(batch: PagedBatch, tile: DecodeTile | None = None) -> DecodeWorkspace:
    (num_seqs, num_q_heads, head_dim), keys = batch.query.shape, batch.key_cache
    return DecodeWorkspace.allocate(
        num_seqs, num_q_heads, keys.shape[2], head_dim, keys.dtype, keys.device, tile
    )


@pytest.mark.parametrize(
    ("context_lens", "tile", "num_kv_heads"),
    [
        *(
            (lens, DecodeTile(32, 2, 2, 1), 1)
            for lens in ([1], [0], [0, 0, 130, 7, 0], [64, 32, 96], [31, 33, 1, 1, 1, 150])
        ),
        *(([200], DecodeTile(16, 2, 2, programs), 2) for programs in (1, 3)),
    ],
    ids=str,
)
def test_decode_of_any_lengths_and_padding_rows(
    context_lens: list[int], tile: DecodeTile, num_kv_heads: int, device: str
) -> None:
    check_decode(context_lens, device, tile=tile, num_kv_heads=num_kv_heads)


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
def test_prefill_of_whole_prompts_chunks_and_single_tokens(
    context_lens: list[int], query_lens: list[int], device: str
) -> None:
    check_prefill(context_lens, query_lens, device)


@pytest.mark.parametrize(
    "sizes",
    [
        *(
            {"num_q_heads": kv * group, "num_kv_heads": kv}
            for kv, group in ((3, 1), (2, 3), (1, 16))
        ),
        *({"head_dim": head_dim} for head_dim in (64, 80, 96, 128, 256)),
        *({"block_size": block_size} for block_size in (1, 3, 48, 256)),
        {"dtype": torch.float16},
        # The interpreter multiplies the bits of bf16 matrices as if they were integers.
        pytest.param({"dtype": torch.bfloat16}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_any_heads_block_sizes_and_numbers(sizes: dict[str, Any], device: str) -> None:
    check_decode([40, 0, 9], device, **sizes)
    check_prefill([30, 17], [30, 5], device, **sizes)


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "group", "sets"),
    [
        (1, 2, 16, 4),
        (3, 1, 12, 4),
        (4, 2, 6, 2),
        (2, 2, 4, 2),
        (1, 1, 7, 1),
        (1, 3, 2, 1),
        (17, 2, 8, 2),
        (33, 2, 4, 1),
    ],
)
def test_few_sequences_deal_the_heads_of_a_kv_head_to_several_programs(
    num_seqs: int, num_kv_heads: int, group: int, sets: int, device: str
) -> None:
    heads = {"num_q_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}
    assert sets_of_kv_head(num_seqs, **heads) == sets
    lens = [150, *(7 * seq % 40 for seq in range(1, num_seqs))]
    tile = DecodeTile(16, 2, 2, 8)
    check_decode(lens, device, window=100, tile=tile, has_sinks=True, **heads)


@pytest.mark.parametrize("window", [1, 7, 20, 64, 1000])
def test_sliding_window(window: int, device: str) -> None:
    check_decode([70, 19, 0, 20, 64], device, window, DecodeTile(16, 2, 2, 2))
    check_prefill([40, 19], [12, 19], device, window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("group", [1, 3])
def test_sinks_count_once_in_each_row(window: int | None, group: int, device: str) -> None:
    sizes: dict[str, Any] = {"num_q_heads": 2 * group, "num_kv_heads": 2, "has_sinks": True}
    check_decode([70, 1, 0, 20, 130], device, window, DecodeTile(16, 2, 2, 2), **sizes)
    check_prefill([40, 19, 1], [12, 19, 1], device, window, **sizes)


def test_prefill_of_the_tail_of_a_mixed_step_leaves_decode_rows_alone(device: str) -> None:
    batch = random_batch([30, 20, 25], [1, 1, 12], device)
    query, keys, values, *tables = *batch.decode_inputs, batch.query_start_loc
    tail: list[Any] = [each[2:] for each in tables]
    output = torch.full_like(query, torch.nan)
    paged_prefill(query, keys, values, *tail, output=output, tile=SMALL)  # type: ignore[misc]
    assert output[:2].isnan().all()
    assert relative_error(output[2:], paged_prefill_torch(query, keys, values, *tail)[2:]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_large_mixed_batches(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    sizes: dict[str, Any] = {
        "num_q_heads": 16,
        "num_kv_heads": 8,
        "head_dim": head_dim,
        "dtype": dtype,
        "has_sinks": window is not None,
    }
    lens = [0, 1, 4000, 17, 0, 900, 1024, 33, 6000, 15, 16, 0]
    check_decode(lens, "cuda", window, launches=20, **sizes)
    lens, chunks = [700, 1, 2000, 64, 1500], [700, 1, 512, 64, 3]
    check_prefill(lens, chunks, "cuda", window, tile=None, **sizes)


def test_more_tiles_than_32_bits_divide_are_shared_in_64(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    batch = random_batch([50, 0, 131, 64], [1] * 4, device)
    workspace = workspace_of(batch)
    table = torch.empty(4096, 2**17, dtype=torch.int32, device="meta")
    assert has_many_tiles(table, 1024, workspace)
    assert not has_many_tiles(batch.block_table, 16, workspace)
    expected = flash_decode(*batch.decode_inputs, workspace=workspace)
    monkeypatch.setattr("m5_kernels.kernels.flash_decode.has_many_tiles", lambda *_: True)
    assert torch.equal(flash_decode(*batch.decode_inputs, workspace=workspace), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [1, 16, 100, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_large_block_sizes_and_groups(block_size: int, group: int) -> None:
    sizes: dict[str, Any] = {"num_q_heads": 2 * group, "num_kv_heads": 2, "head_dim": 128}
    sizes |= {"block_size": block_size, "dtype": torch.bfloat16}
    check_decode([3000, 1, 777], "cuda", launches=5, **sizes)
    check_prefill([900, 333], [900, 100], "cuda", tile=None, **sizes)


@pytest.mark.gpu
def test_a_replayed_graph_follows_changed_lengths() -> None:
    batch = PagedBatch.random([512] * 8, [1] * 8)
    workspace = workspace_of(batch)
    output = flash_decode(*batch.decode_inputs, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_decode(*batch.decode_inputs, output=output, workspace=workspace)
    for lens in ([512] * 8, [1, 0, 512, 3, 0, 0, 100, 511], [0] * 7 + [512]):
        batch.context_lens.copy_(torch.tensor(lens))
        output.fill_(torch.nan)
        graph.replay()
        assert relative_error(output, flash_decode_torch(*batch.decode_inputs)) < 1e-2
