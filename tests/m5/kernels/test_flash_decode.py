"""Flash-Decoding against its twin: any mix of lengths, heads, block sizes, splits and windows."""

from __future__ import annotations

import itertools

import pytest
import torch

from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode, flash_decode_torch
from m5_kernels.kernels.tiles import DecodeTile
from m5_kernels.tools.measure import PagedBatch, relative_error

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(
    context_lens: list[int],
    device: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    tile: DecodeTile | None = None,
    launches: int = 1,
) -> None:
    batch = PagedBatch.random(
        context_lens, [1] * len(context_lens), num_q_heads, num_kv_heads, head_dim, block_size,
        dtype, device,
    )  # fmt: skip
    # What no token was written to must not matter, whatever it holds.
    for seq, length in enumerate(context_lens):
        if length % block_size:
            last = int(batch.block_table[seq, length // block_size])
            batch.key_cache[last, length % block_size :] = torch.nan
            batch.value_cache[last, length % block_size :] = torch.nan
    arguments = (
        batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.context_lens,
    )  # fmt: skip
    workspace = DecodeWorkspace.allocate(
        len(context_lens), num_q_heads, num_kv_heads, head_dim, dtype, device, tile
    )
    workspace.partial_output.fill_(torch.nan)
    workspace.partial_lse.fill_(torch.nan)
    expected = flash_decode_torch(*arguments, window=window)
    outputs = []
    for _ in range(launches):
        outputs.append(torch.full_like(batch.query, torch.nan))
        flash_decode(*arguments, window=window, output=outputs[-1], workspace=workspace)
        assert not workspace.arrivals.any(), "the next launch would wait for nobody"
    assert relative_error(outputs[0], expected) < MAX_ERROR[dtype]
    padding = torch.tensor(context_lens, device=device) == 0
    assert not outputs[0][padding].any()
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0]), "the order of arrival shows"


@pytest.mark.parametrize(
    "context_lens",
    [[1], [200], [0], [5, 0, 33, 1], [0, 0, 130, 7, 0], [64, 32, 96], [31, 33, 1, 1, 1, 150]],
    ids=str,
)
def test_lengths_and_padding_rows(context_lens: list[int], device: str) -> None:
    check(context_lens, device, num_q_heads=2, num_kv_heads=1, tile=DecodeTile(32, 2, 2, 1))


@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 1), (1, 3), (2, 1), (3, 2), (16, 1)])
def test_query_heads_per_kv_head(group: int, num_kv_heads: int, device: str) -> None:
    check([40, 0, 9], device, group * num_kv_heads, num_kv_heads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, device: str) -> None:
    check([33, 3], device, 2, 1, head_dim=head_dim)


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 256])
def test_block_size_is_independent_of_the_tile(block_size: int, device: str) -> None:
    check([50, 17], device, 2, 1, block_size=block_size, tile=DecodeTile(32, 2, 2, 1))


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_sliding_window(window: int, device: str) -> None:
    check([70, 19, 0, 20, 64], device, 2, 1, window=window, tile=DecodeTile(16, 2, 2, 2))


# The interpreter multiplies the bits of bf16 matrices as if they were integers.
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    check([90, 33], device, 4, 2, dtype=dtype)


@pytest.mark.parametrize("programs", [1, 3])
def test_one_sequence_split_over_all_programs(programs: int, device: str) -> None:
    check([200], device, 2, 2, tile=DecodeTile(16, 2, 2, programs))


def test_more_sequences_than_the_workspace_holds_are_refused(device: str) -> None:
    batch = PagedBatch.random([1] * 3, [1] * 3, 2, 1, 16, 16, torch.float32, device)
    workspace = DecodeWorkspace.allocate(2, 2, 1, 16, torch.float32, device)
    with pytest.raises(ValueError, match="3 sequences, but the workspace holds 2"):
        flash_decode(
            batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.context_lens,
            workspace=workspace,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 500])
def test_large_mixed_batch(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    lens = [0, 1, 4000, 17, 0, 900, 1024, 33, 6000, 15, 16, 0]
    check(lens, "cuda", 16, 8, head_dim, 16, dtype, window, launches=20)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("block_size", "group"), itertools.product([1, 16, 100, 256], [1, 3, 7, 16])
)
def test_large_block_sizes_and_groups(block_size: int, group: int) -> None:
    check([3000, 1, 777], "cuda", 2 * group, 2, 128, block_size, torch.bfloat16, launches=5)


@pytest.mark.gpu
def test_replayed_graph_follows_changed_lengths() -> None:
    batch = PagedBatch.random([512] * 8, [1] * 8, 16, 8, 128)
    workspace = DecodeWorkspace.allocate(8, 16, 8, 128, torch.bfloat16, "cuda")
    arguments = (
        batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.context_lens,
    )  # fmt: skip
    output = flash_decode(*arguments, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_decode(*arguments, output=output, workspace=workspace)
    for lens in ([512] * 8, [1, 0, 512, 3, 0, 0, 100, 511], [0] * 7 + [512]):
        batch.context_lens.copy_(torch.tensor(lens))
        output.fill_(torch.nan)
        graph.replay()
        assert relative_error(output, flash_decode_torch(*arguments)) < 1e-2
