"""What the programs of `flash_decode` leave for each other, and how the last one puts it together.

A sequence that several programs share is in parts: each has the sum of the values that it saw,
weighed by its own scores, and the log-sum-exp of these. Of two parts the one with the larger
log-sum-exp counts for more, by the exponential of the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import next_power_of_2, num_multiprocessors, tl, triton
from .tiles import DecodeTile, decode_tile

MIN_ROWS = 16
"""Rows of the smallest matrix product."""
FLOOR = tl.constexpr(-1e30)
"""Below every score: the maximum of nothing, as a difference of infinities would be no number."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Data that the programs of one launch exchange. Kernels on one stream can share it.

    partial_output: fp32 `[2 * num_programs, num_rows, head_dim_pad]`, num_rows being those of a
    query head, or with guesses of several places; partial_lse: fp32 `[2 * num_programs, num_rows]`,
    in log2; arrivals: int32 `[max_num_seqs * num_kv_heads]`, zero between launches.
    """

    partial_output: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor
    programs_per_head: int
    tile: DecodeTile

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        tile: DecodeTile | None = None,
        has_guesses: bool = False,
    ) -> DecodeWorkspace:
        """Room for any step of up to `max_num_seqs` sequences; 10 MiB at most."""
        device = torch.device(device)
        head_dim_pad = next_power_of_2(head_dim)
        tile = tile or decode_tile(head_dim_pad, dtype, device)
        slots = num_multiprocessors(device) * tile.programs_per_sm
        programs_per_head = max(1, slots // num_kv_heads)
        num_partials = 2 * programs_per_head * num_kv_heads
        num_rows = next_power_of_2(num_q_heads // num_kv_heads)
        if has_guesses:
            num_rows = max(num_rows, MIN_ROWS)
        return cls(
            partial_output=torch.empty(num_partials, num_rows, head_dim_pad, device=device),
            partial_lse=torch.empty(num_partials, num_rows, device=device),
            arrivals=torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device),
            programs_per_head=programs_per_head,
            tile=tile,
        )


@triton.jit
def merge_parts(
    partial_output, partial_lse, first_worker, last_worker, first_slot, kv_head,
    output, output_stride, output_head_stride,
    num_places,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    PLACES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Weigh the partial sums of a sequence and KV head by their log-sum-exp, in program order.

    One place after another: their parts together would be more than registers hold.
    """
    # Many parts are loaded together: one after another, each would cost a trip to the L2 cache.
    PARTS: tl.constexpr = 32 // GROUP_POW2 if GROUP_POW2 < 16 else 2
    rows = tl.arange(0, GROUP_POW2)
    dims = tl.arange(0, HEAD_DIM_PAD)
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = output + (kv_head * GROUP + rows)[:, None] * output_head_stride + dims[None, :]
    for place in range(num_places):
        accumulator = tl.zeros([GROUP_POW2, HEAD_DIM_PAD], dtype=tl.float32)
        row_max = tl.full([GROUP_POW2], FLOOR, dtype=tl.float32)
        row_sum = tl.zeros([GROUP_POW2], dtype=tl.float32)
        for base in range(first_worker, last_worker + 1, PARTS):
            workers = base + tl.arange(0, PARTS)
            slots = 2 * (workers * NUM_KV_HEADS + kv_head)
            slots += tl.where(workers == first_worker, first_slot, 0)
            partial_rows = (slots * PLACES + place)[:, None] * GROUP_POW2 + rows[None, :]
            mask = (workers <= last_worker)[:, None] & (rows < GROUP)[None, :]
            # .cg: from the L2 cache, where the other programs' stores are.
            lse = tl.load(
                partial_lse + partial_rows, mask, other=-float("inf"), cache_modifier=".cg"
            )
            parts = tl.load(
                partial_output + partial_rows[:, :, None] * HEAD_DIM_PAD + dims[None, None, :],
                mask[:, :, None] & row_mask[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_max = tl.maximum(row_max, tl.max(lse, 0))
            rescale = tl.exp2(row_max - new_max)
            weights = tl.exp2(lse - new_max[None, :])
            row_sum = row_sum * rescale + tl.sum(weights, 0)
            accumulator = accumulator * rescale[:, None] + tl.sum(parts * weights[:, :, None], 0)
            row_max = new_max
        result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        target = pointers + place * output_stride
        tl.store(target, result.to(output.dtype.element_ty), mask=row_mask)
