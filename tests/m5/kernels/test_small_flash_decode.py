"""The small Flash-Decoding of M5's chapter, against the twin of M5's own."""

import pytest
import torch

from docs.questions.m5_small_flash_decode import small_flash_decode
from m5_kernels.kernels.flash_decode import flash_decode_torch
from m5_kernels.tools.measure import PagedBatch, relative_error

CASES = {  # contexts, query heads, KV heads, block size, splits, tile
    "one head, full tiles": ([32], 1, 1, 16, 1, 16),
    "groups, tails and padding": ([5, 0, 100, 33], 6, 2, 16, 3, 32),
    "tiles over several blocks": ([50, 7], 4, 4, 4, 2, 16),
    "tiles that begin within a block": ([90], 4, 2, 32, 4, 16),
    "more splits than tiles": ([17, 1], 4, 1, 16, 8, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_the_chapters_small_kernel_equals_the_twin(case, device):
    lens, num_q_heads, num_kv_heads, block_size, num_splits, tile = CASES[case]
    sizes = num_q_heads, num_kv_heads, 16, block_size, torch.float32, device
    batch = PagedBatch.random(lens, [1] * len(lens), *sizes)
    output = small_flash_decode(*batch.decode_inputs, num_splits, tile)
    assert relative_error(output, flash_decode_torch(*batch.decode_inputs)) < 1e-5
    assert not output[batch.context_lens == 0].any(), "padding"
