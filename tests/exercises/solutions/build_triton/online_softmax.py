"""A solution of step 3 of the Triton course."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def online_softmax(x: torch.Tensor, output: torch.Tensor, tile: int) -> None:
    """Write the softmax of each row of x, `[num_rows, num_columns]`, to output, of that shape.

    Args:
        tile: columns that are read at a time, a power of two.
    """
    num_rows, num_columns = x.shape
    _online_softmax_kernel[(num_rows,)](
        x, output, num_columns, x.stride(0), output.stride(0), TILE=tile
    )


@triton.jit
def _online_softmax_kernel(x, output, num_columns, x_stride, output_stride, TILE: tl.constexpr):
    row = tl.program_id(0)
    row_max, row_sum = -1.0e30, 0.0
    for start in range(0, num_columns, TILE):
        columns = start + tl.arange(0, TILE)
        mask = columns < num_columns
        tile = tl.load(x + row * x_stride + columns, mask=mask, other=-float("inf"))
        new_max = tl.maximum(row_max, tl.max(tile, 0))
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(tl.exp(tile - new_max), 0)
        row_max = new_max
    for start in range(0, num_columns, TILE):
        columns = start + tl.arange(0, TILE)
        mask = columns < num_columns
        tile = tl.load(x + row * x_stride + columns, mask=mask, other=-float("inf"))
        weights = tl.exp(tile - row_max) / row_sum
        tl.store(output + row * output_stride + columns, weights, mask=mask)
