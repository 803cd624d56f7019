"""Checks exercises/m3_slots.py."""

from types import SimpleNamespace

import torch

EXERCISE = ("m3_slots.py", "")

BLOCK_SIZE = 4
TABLES = torch.tensor([[7, 2, -1], [1, 4, 3]])
NUM_BLOCKS = 9


def as_regions(block_tables, starts, num_new, block_size):
    """As if a request's blocks were neighbours, as in M2."""
    rows = torch.arange(len(starts)).repeat_interleave(num_new)
    places = torch.cat([torch.arange(count) for count in num_new])
    return block_tables[rows, 0] * block_size + starts[rows] + places


def region_gather(cache, block_tables, context_lens):
    neighbours = block_tables[:, :1] + torch.arange(block_tables.shape[1])
    keys = cache[neighbours.clamp(max=len(cache) - 1)].flatten(1, 2)
    return keys, torch.arange(keys.shape[1]) < context_lens[:, None]


REGIONS = SimpleNamespace(slot_mapping=as_regions, gather=region_gather)
WRONG, TOLD = REGIONS, r"slots \[9, 10, 12\], yours are \[33, 34, 12\]"


def test_slots(exercise):
    for story, starts, num_new, wanted in (
        ("positions 5 and 6 of row 0 and 8 of row 1", [5, 8], [2, 1], [9, 10, 12]),
        ("prompts of 6 and 9 tokens", [0, 0], [6, 9],
         [28, 29, 30, 31, 8, 9, 4, 5, 6, 7, 16, 17, 18, 19, 12]),
    ):  # fmt: skip
        given = torch.tensor(starts), torch.tensor(num_new)
        slots = exercise.slot_mapping(TABLES, *given, BLOCK_SIZE).tolist()
        assert slots == wanted, f"{story} have slots {wanted}, yours are {slots}"


def test_gather(exercise):
    contexts = [7, 9]
    # Every token's number is its own: row * 100 + position. The rest is NaN.
    cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, 3), float("nan"))
    for row, context_len in enumerate(contexts):
        for position in range(context_len):
            block = TABLES[row, position // BLOCK_SIZE]
            cache[block, position % BLOCK_SIZE] = row * 100 + position
    keys, mask = exercise.gather(cache, TABLES, torch.tensor(contexts))
    assert keys.shape == (2, 12, 2, 3), f"keys should be [2, 12, 2, 3], yours are {keys.shape}"
    for row, context_len in enumerate(contexts):
        assert mask[row].tolist() == [place < context_len for place in range(12)], (
            f"row {row} has {context_len} tokens; your mask is {mask[row].int().tolist()}"
        )
        own = keys[row, :context_len, 0, 0].tolist()
        wanted = [row * 100.0 + position for position in range(context_len)]
        assert own == wanted, f"row {row} should read {wanted}, yours reads {own}"
        rest = keys[row, context_len:]
        assert not rest.isnan().any(), (
            f"row {row}: behind its {context_len} tokens your keys hold a NaN that somebody else "
            "left in a block. Masked or not, it would reach the result: 0 * NaN is NaN."
        )
        assert (rest == 0).all(), f"row {row}: behind its {context_len} tokens keys should be 0"


def num_read_back(exercise):
    """Of tokens written in two steps and then gathered: how many come back, and how many there are.

    A dozen requests of up to 60 tokens, whose blocks lie anywhere.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 61, (12,), generator=generator)
    blocks = torch.randperm(12 * 15, generator=generator).reshape(12, 15)
    tables = torch.where(torch.arange(15) * BLOCK_SIZE < lengths[:, None], blocks, -1)
    cache, half = torch.zeros(12 * 15 + 15, BLOCK_SIZE, 1, 1), lengths // 2
    names = 1000.0 * torch.arange(1, 13)[:, None] + torch.arange(60)
    for starts, num_new in ((torch.zeros_like(half), half), (half, lengths - half)):
        slots = exercise.slot_mapping(tables, starts, num_new, BLOCK_SIZE)
        own = [names[i, s : s + n] for i, (s, n) in enumerate(zip(starts, num_new, strict=True))]
        cache.flatten(0, 1)[slots, 0, 0] = torch.cat(own)
    keys, mask = exercise.gather(cache, tables, lengths)
    is_token = torch.arange(60) < lengths[:, None]
    return int(((keys[:, :, 0, 0] == names) & mask & is_token).sum()), int(lengths.sum())


def test_what_was_written_is_read_back(exercise, figure):
    num_right, total = num_read_back(exercise)
    before = num_read_back(REGIONS)[0]
    figure("tokens read back", f"{num_right / total:.0%}", f"{before / total:.0%} (as regions)")
    assert num_right == total, f"{num_right} of {total} tokens are read back as they were written"
