"""M5, tensors: the metadata of a step, computed without reading a value from the GPU.

M5 plans a step before the tokens of the step before have come back, and replays it as a CUDA graph.
A graph is a fixed list of kernels with fixed shapes. So the host must not read a value from the GPU
on the way: `.item()`, `.tolist()`, `int(tensor)`, `if tensor:` and `tensor[mask]` all wait for the
GPU, and are not allowed while a graph is captured. Two numbers a sequence come in; a number for
every token comes out:

    num_computed  [4, 0, 7]   num_new  [1, 3, 0]     the third sequence is padding
    num_tokens    6                                  size of the bucket: 4 tokens, 2 of padding

    positions        [4,  0, 1, 2,  0, 0]            0 in padding
    slot_mapping     [s,  s, s, s, -1, -1]           block * block_size + offset; -1 in padding
    query_start_loc  [0,  1, 4, 4]                   where each sequence's tokens begin and end
    context_lens     [5,  3, 7]

Write it with operations whose shapes are known beforehand. The test also runs it on tensors that
have a shape and no values (`device="meta"`): code that reads a value raises an error. The engine
does this in one kernel, m5_kernels/kernels/expand_step.py.

    python -m pytest tests/exercises/test_m5_expand_on_device.py
"""

from __future__ import annotations

import torch


def expand(
    num_computed: torch.Tensor,
    num_new: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `positions` and `slot_mapping`, `[num_tokens]`; `query_start_loc`, `[num_seqs + 1]`;
    `context_lens`, `[num_seqs]`. All are integers.

    Args:
        num_computed: int64 `[num_seqs]`, tokens in the cache.
        num_new: int64 `[num_seqs]`, new tokens, 0 for padding; `num_tokens` at most in all.
        block_tables: int64 `[num_seqs, max_blocks]`.
        block_size: tokens of a KV block.
        num_tokens: number of entries in the result; those that no sequence needs are padding.

    Hint: with `ends = num_new.cumsum(0)`, token i belongs to the first sequence whose end is larger
    than i: `torch.searchsorted(ends, ..., right=True)`. In padding it finds none and gives
    `num_seqs`, so clamp it and put the padding in with `torch.where`. New tensors go to the device
    of the old ones: `torch.arange(num_tokens, device=num_new.device)`.
    """
    raise NotImplementedError
