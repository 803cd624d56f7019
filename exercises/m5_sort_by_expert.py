"""M5, tensors: sort the tokens of a step by expert, without reading a value from the GPU.

In a layer of experts each token meets `top_k` of them. Token and expert are a pair, number
`token * top_k + choice`. All pairs of an expert are multiplied with the same weights, so they come
together, in the order of their numbers, in tiles of so many rows. A tile belongs to one expert;
rows that it does not use hold -1:

    topk_ids  [[2, 0], [2, 1], [0, 2]]      three tokens, pairs 0 to 5
    rows      2                             of a tile
    max_tiles 5                             the most that there can be

    tile_experts  [ 0,     1,     2,     2,    -1    ]     -1: there is no such tile
    sorted_pairs  [ 1, 4,  3, -1,  0, 2,  5, -1,  -1, -1 ]

How many tiles there are depends on what the router has chosen. A CUDA graph is launched the same
way for every choice. So the results have the shape of the most tiles, and nothing on the way may
wait for the GPU: no `.item()`, `.tolist()`, `bincount`, `nonzero` or `tensor[mask]`. The test
also runs it on tensors that have a shape and no values (`device="meta"`). The engine does this in
one kernel, m5_kernels/extras/experts/sorting.py.

    python -m pytest tests/exercises/test_m5_sort_by_expert.py
"""

from __future__ import annotations

import torch


def sort_by_expert(
    topk_ids: torch.Tensor, num_experts: int, rows: int, max_tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `sorted_pairs`, `[max_tiles * rows]`, and `tile_experts`, `[max_tiles]`: integers.

    topk_ids: int64 `[num_tokens, top_k]`, all below `num_experts`.

    Hint: `argsort(stable=True)` of the flat ids is the order of the pairs. The number of pairs of
    each expert is a `scatter_add` of ones. From it follow the tiles of each expert, and from their
    `cumsum` where an expert's first tile is; `searchsorted(..., right=True)` says whose a tile is.
    """
    raise NotImplementedError
