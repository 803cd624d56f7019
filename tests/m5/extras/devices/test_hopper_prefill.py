"""The kernel for Hopper: its tiles on any machine, itself on a GPU that has what it takes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from m5_kernels.decoder.attention import AttentionLayer
from m5_kernels.extras.devices.hopper_chunks import MIN_TOKENS, HopperChunks
from m5_kernels.extras.devices.hopper_prefill_tiles import QUERIES, prefill_tiles
from m5_kernels.kernels.launch import PLAIN
from m5_kernels.kernels.paged_prefill import paged_prefill_torch
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.tools.measure import PagedBatch

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")


def tiles_of(batch: PagedBatch, first_seq: int) -> torch.Tensor:
    first = torch.tensor([first_seq], dtype=torch.int32, device=batch.query.device)
    num_seqs = len(batch.context_lens) - first_seq
    return prefill_tiles(
        batch.context_lens, batch.query_start_loc, first, len(batch.query), num_seqs
    )


def random_lens(rng: random.Random, longest: int) -> tuple[list[int], list[int], int]:
    """Contexts and what is new of them; of the first sequences one token is, a chunk of none."""
    num_decodes = rng.randint(0, 3)
    contexts = [rng.randint(1, longest) for _ in range(num_decodes + rng.randint(1, 5))]
    new = [1 if seq < num_decodes else rng.randint(1, n) for seq, n in enumerate(contexts)]
    return contexts, new, num_decodes


@pytest.mark.parametrize("seed", range(8))
def test_tiles_cover_each_row_of_a_chunk_once_and_the_longest_walks_come_first(seed):
    contexts, new, num_decodes = random_lens(random.Random(seed), 600)
    batch = PagedBatch.random(contexts, new, 2, 1, 16, dtype=torch.float32, device="cpu")
    output = torch.full_like(batch.query, torch.nan)
    tiles = tiles_of(batch, num_decodes).tolist()
    walks = [position + min(QUERIES, rows) for _, rows, position, _ in tiles if rows]
    assert walks == sorted(walks, reverse=True)
    assert all(rows for _, rows, _, _ in tiles[: len(walks)])
    for first_row, rows_left, position, seq in tiles[: len(walks)]:
        rows = slice(first_row, first_row + min(QUERIES, rows_left))
        assert output[rows].isnan().all(), "a row belongs to two tiles"
        end = position + rows.stop - rows.start
        output[rows] = paged_prefill_torch(
            batch.query[rows],
            batch.key_cache,
            batch.value_cache,
            batch.block_table[seq : seq + 1],
            torch.tensor([end]),
            torch.tensor([0, rows.stop - rows.start]),
        )
    assert output[:num_decodes].isnan().all()
    expected = paged_prefill_torch(*batch.decode_inputs, batch.query_start_loc)
    torch.testing.assert_close(output[num_decodes:], expected[num_decodes:])


@pytest.mark.parametrize("layer", [AttentionLayer(0, 7), AttentionLayer(0, sinks=torch.ones(2))])
def test_layers_with_a_window_or_sinks_are_left_to_the_lesson(layer):
    batch = PagedBatch.random([20], [20], 2, 1, 16, 4, torch.float32, "cpu")
    metadata = StepMetadata.allocate(MIN_TOKENS, 1, batch.block_table.shape[1], "cpu")
    metadata = dataclasses.replace(
        metadata,
        context_lens=batch.context_lens,
        query_start_loc=batch.query_start_loc,
        block_table=batch.block_table,
        first_chunk=torch.tensor([0]),
        num_chunks=1,
        chunk_plan=torch.zeros(1),
    )
    output = torch.empty_like(batch.query)
    HopperChunks()(*batch.decode_inputs[:3], metadata, layer, output, PLAIN)
    expected = paged_prefill_torch(
        *batch.decode_inputs, batch.query_start_loc, window=layer.window, sinks=layer.sinks
    )
    torch.testing.assert_close(output, expected)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "heads"), [(128, (16, 8)), (64, (9, 3)), (128, (8, 1))])
@pytest.mark.parametrize("block_size", [16, 64])
def test_it_equals_the_specification_in_fp64(dtype, head_dim, heads, block_size):
    from m5_kernels.extras.devices.hopper_prefill import hopper_prefill

    rng = random.Random(block_size + head_dim)
    cases = [([n], [n], 0) for n in (1, 127, 128, 129, 300)]
    cases += [([600], [600 - start], 0) for start in range(255, 273)]  # every offset of a page
    cases += [random_lens(rng, 1500) for _ in range(12)]
    for contexts, new, num_decodes in cases:
        batch = PagedBatch.random(contexts, new, *heads, head_dim, block_size, dtype)
        output = torch.full_like(batch.query, torch.nan)
        tiles = tiles_of(batch, num_decodes)
        caches = batch.key_cache, batch.value_cache
        hopper_prefill(batch.query, *caches, batch.block_table, tiles, head_dim**-0.5, output)
        wide = [tensor.double() for tensor in (batch.query, *caches)]
        expected = paged_prefill_torch(
            *wide, batch.block_table, batch.context_lens, batch.query_start_loc
        )
        start = num_decodes  # of which one row each
        assert output[:start].isnan().all(), (contexts, new)
        error = (output[start:].double() - expected[start:]).abs().max()
        assert error < (2e-2 if dtype is torch.bfloat16 else 3e-3), (contexts, new, float(error))
