"""Where `hopper_prefill` runs, and which query rows its programs take: the longest walks first.

A chunk is cut into tiles of `QUERIES` query tokens. Each tile walks the context up to its own last
token, so the last tiles of a long prompt take many times as long as its first ones. The tile that
starts last must be short, or all other multiprocessors wait for it:

    longest first   |#########|######|###|#|        any order   |#|###|######|#########|
    3 programs      |########|######|####|                      |###|########|......
                    |#######|#######|###|                       |######|####|......   <- idle
"""

from __future__ import annotations

import functools

import torch

from .hopper_device import is_hopper

QUERIES = 128
"""Query tokens of a tile."""


def prefill_tiles(
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    first_seq: torch.Tensor,
    num_tokens: int,
    max_seqs: int,
) -> torch.Tensor:
    """Return the tiles of all chunks of a step. Computed on the device, once for all layers.

    context_lens, query_start_loc, first_seq: as in `paged_prefill`. num_tokens: number of tokens of
    the step. max_seqs: most chunks that it has. Both numbers are on the host, so nothing waits.

    Returns int32 `[num_tiles, 4]`: the row of `query` where a tile begins; how many rows from there
    on are its chunk's (0: there is no such tile); the position of the first; its sequence.
    """
    seqs = torch.arange(len(context_lens), device=context_lens.device, dtype=torch.int32)
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    chunk_lens = torch.where(seqs >= first_seq, ends - starts, 0)
    first_tiles = starts // QUERIES + seqs  # leaves at most one number per sequence unused
    tiles = torch.arange(
        num_tokens // QUERIES + len(context_lens), device=seqs.device, dtype=torch.int32
    )
    owner = torch.searchsorted(first_tiles, tiles, right=True) - 1
    tokens = (tiles - first_tiles[owner]) * QUERIES
    rows_left = (chunk_lens[owner] - tokens).clamp(min=0)
    positions = context_lens[owner] - chunk_lens[owner] + tokens
    walks = torch.where(rows_left > 0, positions + rows_left.clamp(max=QUERIES), 0)
    order = walks.argsort(descending=True)[: num_tokens // QUERIES + max_seqs]
    columns = starts[owner] + tokens, rows_left, positions, seqs[owner]
    return torch.stack(columns, 1)[order]


@functools.cache
def runs_on_hopper(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> bool:
    """Return whether `hopper_prefill` supports this GPU and these shapes.

    If not, `paged_prefill` runs.
    """
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and block_size in (16, 32, 64, 128)
    )
