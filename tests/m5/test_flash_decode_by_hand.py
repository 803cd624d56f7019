"""Flash-Decoding by hand is the kernel's: the same shares, the same attention."""

import itertools

import pytest
import torch

from docs.questions import flash_decode_by_hand as by_hand
from m5_kernels.kernels import flash_decode
from m5_kernels.kernels.flash_decode import flash_decode_torch


@pytest.mark.parametrize("num_programs", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("tile", [1, 2, 4])
def test_split_and_merge_by_hand_is_the_kernels_attention(num_programs, tile):
    lens, generator = [9, 1, 30, 4], torch.Generator().manual_seed(1)
    query = torch.ones(4, 1, 1)
    keys = torch.randn(sum(lens), 1, 1, 1, generator=generator)  # a block a token
    values = torch.randn(sum(lens), 1, 1, 1, generator=generator)
    table = torch.zeros(4, max(lens), dtype=torch.int32)
    parts = torch.arange(sum(lens), dtype=torch.int32).split(lens)
    for row, part in zip(table, parts, strict=True):
        row[: len(part)] = part
    expected = flash_decode_torch(query, keys, values, table, torch.tensor(lens), scale=1.0)
    log2_e = by_hand.math.log2(by_hand.math.e)
    scores = [[float(x) * log2_e for x in keys.flatten()[part.long()]] for part in parts]
    numbers = [values.flatten()[part.long()].tolist() for part in parts]
    output = by_hand.flash_decode(scores, numbers, tile, num_programs)
    torch.testing.assert_close(torch.tensor(output), expected.flatten(), rtol=1e-4, atol=1e-5)


def test_shares_cover_every_tile_once_and_differ_by_one_tile_at_most():
    kv_splits = by_hand.split([10, 3, 0, 7], tile=2, num_programs=5)
    tiles = [(p.seq, tile) for p in kv_splits for tile in range(p.first_tile, p.end_tile)]
    assert tiles == [(0, i) for i in range(5)] + [(1, 0), (1, 1), (2, 0)] + [
        (3, i) for i in range(4)
    ]
    sizes = [
        sum(p.end_tile - p.first_tile for p in kv_splits if p.program == program)
        for program in range(5)
    ]
    assert sorted(sizes) == [2, 2, 2, 3, 3]


def test_the_drawing_in_the_kernels_file_has_its_shares():
    lines = {line[:12].strip(): line for line in flash_decode.__doc__.splitlines() if "|" in line}
    contexts, tiles, programs = (
        [i for i, mark in enumerate(lines[name]) if mark == "|"]
        for name in ("context", "KV tiles", "programs")
    )
    assert set(contexts) | set(programs) <= set(tiles), "a cut beside the edge of a tile"
    cuts, ends = ([tiles.index(i) for i in marks] for marks in (programs, contexts))
    lens = [end - start for start, end in itertools.pairwise(ends)]
    num_programs = len(cuts) - 1
    shares = [0] * num_programs
    for split in by_hand.split(lens, tile=1, num_programs=num_programs):
        shares[split.program] += split.end_tile - split.first_tile
    assert [end - start for start, end in itertools.pairwise(cuts)] == shares
