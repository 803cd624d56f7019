"""KV tensors in blocks: what is written is found, copied and brought back, bit by bit."""

from __future__ import annotations

import pytest
import torch

from helpers.engines import tiny_model
from helpers.schedulers import of_length
from m3_paged.block_cache import BlockCache
from milestone_llm.core.plan import ScheduledRequest, StepPlan

NUM_BLOCKS, BLOCK_SIZE = 6, 4


def filled_cache(family: str = "llama", dtype: torch.dtype = torch.float64) -> BlockCache:
    """Every number in it is another one, on the device and on the host."""
    model = tiny_model(family)
    cache = BlockCache(model, NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=3)
    generator = torch.Generator().manual_seed(0)
    for tensors in (cache.keys, cache.values, cache.host_keys, cache.host_values):
        tensors[:] = [
            torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)
            for tensor in tensors
        ]
    return cache


def snapshot(cache: BlockCache) -> list[torch.Tensor]:
    """Keys and values of all layers, `[num_blocks, ...]` each."""
    return [tensor.clone() for tensor in cache.keys + cache.values]


def test_copies_of_a_step_read_before_any_of_them_writes():
    """Block 1 is copied to 2 and then given to somebody who gets a copy of 0."""
    cache = filled_cache()
    before = snapshot(cache)
    cache.move_blocks(StepPlan(copies=[(0, 1), (1, 2)]))
    for old, new in zip(before, snapshot(cache), strict=True):
        assert torch.equal(new[1], old[0])
        assert torch.equal(new[2], old[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swapping_out_and_in_restores_the_bytes(dtype):
    """Blocks lie together on the host, in another order, and come back to other places."""
    cache = filled_cache(dtype=dtype)
    before, host = snapshot(cache), [t.clone() for t in cache.host_keys + cache.host_values]
    cache.move_blocks(StepPlan(swap_outs=[(5, 2), (1, 0)]))
    for old, new in zip(host, cache.host_keys + cache.host_values, strict=True):
        assert torch.equal(new[1].view(torch.uint8), old[1].view(torch.uint8)), "another's"
    for tensor in cache.keys + cache.values:
        tensor.fill_(-9)  # others write meanwhile
    cache.move_blocks(StepPlan(swap_ins=[(2, 0), (0, 3)]))
    for old, new in zip(before, snapshot(cache), strict=True):
        assert torch.equal(new[[0, 3]].view(torch.uint8), old[[5, 1]].view(torch.uint8))
        assert (new[[1, 2, 4, 5]] == -9).all()


def test_a_step_swaps_out_then_in_and_copies_last():
    """Block 1 is saved before it is overwritten, and copied with what was brought into it."""
    cache = filled_cache()
    before, host = snapshot(cache), [t.clone() for t in cache.host_keys + cache.host_values]
    cache.move_blocks(StepPlan(swap_outs=[(1, 0)], swap_ins=[(0, 3), (2, 1)], copies=[(1, 5)]))
    for old, saved, new in zip(before, host, snapshot(cache), strict=True):
        assert torch.equal(new[3], old[1])
        assert torch.equal(new[1], saved[2])
        assert torch.equal(new[5], saved[2])


@pytest.mark.parametrize(
    ("start", "end", "is_cleared"),
    [
        (0, 6, True),  # a prompt of a block and a half
        (0, 8, False),  # two blocks, both filled
        (4, 5, True),  # the first token of the second block
        (5, 6, False),  # the second: the block has a KV of its own row
        (5, 7, False),
        (0, 5, True),
        (3, 6, True),
    ],
)
def test_of_a_rows_blocks_the_one_it_begins_and_does_not_fill_is_cleared(start, end, is_cleared):
    """What an earlier owner left there may be no number, and masked it would still count."""
    cache = filled_cache()
    expected = snapshot(cache)
    if is_cleared:
        for tensor in expected:
            tensor[2] = 0
    row = ScheduledRequest(of_length("a", 9, 1), start, end - start, blocks=[4, 2, 5])
    cache.clear_last_blocks([row])
    assert all(map(torch.equal, snapshot(cache), expected))


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_a_block_takes_the_memory_that_the_shape_says(family):
    cache = BlockCache(tiny_model(family), NUM_BLOCKS, BLOCK_SIZE)
    num_bytes = sum(tensor.nbytes for tensor in snapshot(cache))
    assert num_bytes == NUM_BLOCKS * BLOCK_SIZE * cache.shape.bytes_per_token
