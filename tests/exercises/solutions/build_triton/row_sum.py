"""A solution of step 1 of the Triton course."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def row_sum(x: torch.Tensor, output: torch.Tensor) -> None:
    """Write the sum of each row of x, `[num_rows, num_columns]`, to output, `[num_rows]`."""
    num_rows, num_columns = x.shape
    tile = triton.next_power_of_2(num_columns)
    _row_sum_kernel[(num_rows,)](x, output, num_columns, x.stride(0), TILE=tile)


@triton.jit
def _row_sum_kernel(x, output, num_columns, row_stride, TILE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    tile = tl.load(x + row * row_stride + columns, mask=columns < num_columns, other=0.0)
    tl.store(output + row, tl.sum(tile, 0))
