"""Flash-Decoding by hand gives the kernel's attention."""

import pytest
import torch

from docs.questions import flash_decode_by_hand as by_hand
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
