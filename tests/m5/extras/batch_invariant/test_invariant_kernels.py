"""Kernels of `batch_invariant`: against their twins, and against themselves in other company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from m5_kernels.decoder.linear import linear_torch
from m5_kernels.extras.batch_invariant import invariant_linear as linear_file
from m5_kernels.extras.batch_invariant.invariant_linear import PART, InvariantLinear
from m5_kernels.extras.batch_invariant.split_attention import (
    FEW_SEQS,
    chunk_tile,
    decode_tile,
    split_decode,
    split_prefill,
)
from m5_kernels.extras.batch_invariant.tiled_linear import FEW, LARGE, SMALL, tiled_linear
from m5_kernels.extras.devices import hopper_device as device_file
from m5_kernels.extras.devices import hopper_linear as hopper_file
from m5_kernels.extras.devices.hopper_device import is_hopper
from m5_kernels.extras.devices.register_linear import register_linear
from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode, flash_decode_torch
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.paged_prefill import paged_prefill_torch
from m5_kernels.kernels.tiles import DecodeTile, PrefillTile
from m5_kernels.tools.measure import PagedBatch, relative_error

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


# --- products ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize(("num_tokens", "has_bias"), [(1, True), (70, False)])
def test_rows_are_multiplied(num_tokens, has_bias, dtype, device):
    hidden = torch.randn(num_tokens, 72, dtype=dtype, device=device)
    weight = torch.randn(136, 72, dtype=dtype, device=device)
    bias = torch.randn(136, dtype=dtype, device=device) if has_bias else None
    linear = InvariantLinear.on(torch.device(device))
    twin = linear_torch(hidden, weight, bias)
    assert relative_error(linear.apply(hidden, weight, bias), twin) < MAX_ERROR[dtype]
    gated = linear_torch(hidden, weight, bias, is_gated=True)
    assert relative_error(linear.gate_up(hidden, weight, bias), gated) < MAX_ERROR[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1024, 3072), (4096, 1024), (1000, 2048), (6144, 4096)])
def test_every_tile_and_number_of_rows_gives_the_same_bits(size):
    """That is why the tile may depend on the number of rows."""
    hidden = torch.randn(1200, size[1], dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(*size, dtype=torch.bfloat16, device="cuda")
    linear = InvariantLinear.on(torch.device("cuda"))
    wanted, gated = linear.apply(hidden, weight), linear.gate_up(hidden, weight)
    for n in (1, 2, 16, 17, 64, 65, 128, 200, 256, 257, 600):
        start = 1200 - n
        assert torch.equal(linear.apply(hidden[start:], weight), wanted[start:]), n
        assert torch.equal(linear.gate_up(hidden[start:], weight), gated[start:]), n
    part = linear.part_size(weight)
    for _, tile in (*FEW, *SMALL, *LARGE):
        assert torch.equal(tiled_linear(hidden, weight, None, tile, part), wanted), tile


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("size", [(40, 1000), (72, 304), (24, 2056), (16, 64)])
def test_parts_are_added_from_first_to_last(size, device):
    """By each kernel, for any number of rows. Sums of a part are exact here, those of parts are
    not: each part has numbers of another size."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    numbers = [
        torch.randint(-8, 9, shape, device=device).float() for shape in (size, (140, size[1]))
    ]
    scales = 2.0 ** (torch.arange(-(-size[1] // PART), device=device) * 11 % 24)
    weight, hidden = numbers[0], numbers[1] * scales.repeat_interleave(PART)[: size[1]]
    wanted, other = torch.zeros(2, 140, size[0], device=device)
    parts = [h @ w.T for h, w in zip(hidden.split(PART, 1), weight.split(PART, 1), strict=True)]
    for part, from_last in zip(parts, parts[::-1], strict=True):
        wanted, other = wanted + part, other + from_last
    assert len(parts) < 8 or not torch.equal(wanted, other)
    hidden, weight, wanted = hidden.to(dtype), weight.to(dtype), wanted.to(dtype)
    kernels: list[Any] = [(register_linear, 16), (tiled_linear, 140)]
    if is_hopper(torch.device(device)):
        kernels.append((hopper_file.hopper_linear, 140))
    for kernel, most in kernels:
        for n in (1, 2, 16, 17, 140):
            if n <= most:
                assert torch.equal(kernel(hidden[:n], weight, part_size=PART), wanted[:n]), n


@pytest.mark.parametrize(
    ("size", "dtype", "part", "taken"),
    [
        ((4096, 1024), torch.bfloat16, PART, ["register", "register", "hopper", "hopper", "tiled"]),
        ((4096, 1024), torch.float16, PART, ["register", "register", "tiled", "tiled", "tiled"]),
        ((4096, 1024), torch.float32, None, ["tiled"] * 5),
        ((24576, 4096), torch.bfloat16, None, ["dot", "dot", "tiled", "tiled", "tiled"]),
        ((1024, 4096), torch.bfloat16, None, ["dot", "dot", "tiled", "hopper", "tiled"]),
    ],
)
def test_all_kernels_of_a_weight_have_the_same_parts(size, dtype, part, taken, monkeypatch):
    launched: list[Any] = []

    def note(name: str) -> Any:
        return lambda *_, part_size=None, **__: launched.append((name, part_size))

    monkeypatch.setattr(device_file, "is_hopper", lambda device: True)
    monkeypatch.setattr(Launch, "runs_triton", lambda launch, tensor: True)
    monkeypatch.setattr(hopper_file, "hopper_linear", note("hopper"))
    for name in ("register", "dot", "tiled"):
        monkeypatch.setattr(linear_file, f"{name}_linear", note(name))
    linear = InvariantLinear(has_hopper=True)
    weight = torch.empty(size, dtype=dtype, device="meta")
    for n in (1, 16, 17, 256, 257):
        linear.apply(torch.empty(n, size[1], dtype=dtype, device="meta"), weight)
    assert launched == [(name, part) for name in taken]


# --- attention -----------------------------------------------------------------------------------

LENS = [1, 90, 33, 64, 130]
CHUNKS = [1, 40, 33, 2, 129]
"""The last tokens of each context."""


def small(tile: PrefillTile, device: str) -> tuple[PrefillTile, int]:
    """Return a tile and a split; in the interpreter small, so that contexts have several."""
    return (tile._replace(rows=16, tokens=16), 64) if device == "cpu" else (tile, 256)


def batch_of(device: str, dtype: torch.dtype, lens: list[int], heads: tuple[int, int]) -> Any:
    """Return a batch with nonsense in the block tables after the contexts."""
    batch = PagedBatch.random(lens, [1] * len(lens), *heads, 32, 16, dtype, device)
    table = batch.block_table.clone()
    for seq, length in enumerate(lens):
        table[seq, -(-length // 16) :] = 2**30
    return replace(batch, block_table=table)


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (20, False), (20, True)])
def test_a_token_attends_as_a_decode_row_and_in_a_chunk(heads, window, has_sinks, dtype, device):
    """As the twins say, and bit for bit the same."""
    batch = batch_of(device, dtype, LENS, heads)
    caches, table = (batch.key_cache, batch.value_cache), batch.block_table
    starts = ints([0, *CHUNKS], device).cumsum(0).int()
    query = torch.randn(sum(CHUNKS), heads[0], 32, dtype=dtype, device=device)
    sinks = torch.linspace(2, -1, heads[0], device=device) if has_sinks else None
    tile, split = small(chunk_tile(32, query.element_size()), device)
    lens = ints(LENS, device)
    chunk = split_prefill(
        query, *caches, table, lens, starts, None, window, sinks=sinks, tile=tile, split=split
    )
    twin = paged_prefill_torch(query, *caches, table, lens, starts, None, window, sinks=sinks)
    assert relative_error(chunk, twin) < MAX_ERROR[dtype]

    places = [(seq, back) for seq, size in enumerate(CHUNKS) for back in range(0, size, 31)]
    seqs = torch.tensor([seq for seq, _ in places], device=device)
    backs = ints([back for _, back in places], device)
    tokens = starts[seqs + 1].long() - 1 - backs
    rows = (query[tokens], *caches, table[seqs], lens[seqs] - backs, None, window)
    tile, split = small(decode_tile(32, query.element_size()), device)
    arrivals = torch.zeros(len(places) * heads[1], dtype=torch.int32, device=device)
    alone = split_decode(*rows, arrivals=arrivals, sinks=sinks, tile=tile, split=split)
    assert torch.equal(alone, chunk[tokens])
    assert len(places) > FEW_SEQS, "one program walked the first splits"
    few = (rows[0][-3:], *caches, *(each[-3:] for each in rows[3:5]), None, window)
    few = split_decode(*few, arrivals=arrivals, sinks=sinks, tile=tile, split=split)
    assert torch.equal(few, alone[-3:])
    assert relative_error(alone, flash_decode_torch(*rows, sinks=sinks)) < MAX_ERROR[dtype]
    assert not arrivals.any()


@pytest.mark.usefixtures("poisoned")
def test_a_padding_row_gets_zeros(device):
    batch = batch_of(device, torch.float32, [40, 1], (2, 1))
    query = torch.randn(2, 2, 32, device=device)
    lens = ints([40, 0], device)
    output = split_decode(query, batch.key_cache, batch.value_cache, batch.block_table, lens)
    assert not output[1].any()
    assert output[0].isfinite().all()


def test_who_else_is_there_moves_the_cuts_of_flash_decoding_alone(device):
    """What `split_decode` is for: the lesson's kernel adds in another order next to others."""
    lens = [300, 1000, 70, 500]
    batch = batch_of(device, torch.float32, lens, (2, 1))
    query = torch.randn(len(lens), 2, 32, device=device)
    arguments = (query, batch.key_cache, batch.value_cache, batch.block_table, ints(lens, device))
    own = [argument[:1] for argument in (query, *arguments[3:])]
    alone = (own[0], *arguments[1:3], *own[1:])
    tile, split = small(decode_tile(32, 4), device)
    together = split_decode(*arguments, tile=tile, split=split)
    assert torch.equal(together[:1], split_decode(*alone, tile=tile, split=split))
    workspace = DecodeWorkspace.allocate(
        len(lens), 2, 1, 32, torch.float32, torch.device(device), DecodeTile(16, 4, 2, 1)
    )
    together = flash_decode(*arguments, workspace=workspace)
    assert not torch.equal(together[:1], flash_decode(*alone, workspace=workspace))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (12, 4)])
def test_long_contexts_in_bf16(heads):
    """The tiles that are used, over several splits."""
    lens, chunks = [5, 700, 2000, 513, 512], [5, 700, 900, 3, 512]
    batch = PagedBatch.random(lens, chunks, *heads, 128, 16, torch.bfloat16, "cuda")
    starts = ints([0, *chunks], "cuda").cumsum(0).int()
    caches, table = (batch.key_cache, batch.value_cache), batch.block_table
    query = torch.randn(sum(chunks), heads[0], 128, dtype=torch.bfloat16, device="cuda")
    chunk = split_prefill(query, *caches, table, ints(lens, "cuda"), starts)
    for seq, size in enumerate(chunks):
        backs = ints(list(range(0, size, 1 + size // 200)), "cuda")
        tokens = starts[seq + 1].long() - 1 - backs
        rows = table[seq][None].expand(len(backs), -1).contiguous()
        decoded = split_decode(query[tokens], *caches, rows, lens[seq] - backs)
        assert torch.equal(decoded, chunk[tokens])
