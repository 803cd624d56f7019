"""Step 1: the sum of each row. One program for each row, one tile for all of its columns.

A launch starts a grid of programs. They all run the same kernel; each asks for its number and takes
its part. A tile has as many elements as was fixed when the kernel was compiled, a power of two. A
row seldom has, so a mask says which elements of the tile exist:

    x  [2, 5]      | a b c d e | f g h i j |          in memory, one row after the other
    program 0        a b c d e   . . .                a tile of 8: the last three are not its own
    columns          0 1 2 3 4   5 6 7                tl.arange(0, TILE)
    mask             1 1 1 1 1   0 0 0                columns < num_columns

A kernel gets a tensor as a pointer to its first element. `x + 3` points three elements further, and
`x + columns` is a tile of pointers. Row i begins at `x + i * row_stride`: rows may lie apart.

`print` works in a kernel: it runs on the CPU here, under Triton's interpreter.

    python -m exercises.build triton 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def row_sum(x: torch.Tensor, output: torch.Tensor) -> None:
    """Write the sum of each row of x, `[num_rows, num_columns]`, to output, `[num_rows]`."""
    raise NotImplementedError(
        "write the body of _row_sum_kernel, three lines: tl.load with mask and other=0.0, tl.sum, "
        "tl.store. Then delete this `raise`."
    )
    num_rows, num_columns = x.shape
    tile = triton.next_power_of_2(num_columns)
    _row_sum_kernel[(num_rows,)](x, output, num_columns, x.stride(0), TILE=tile)


@triton.jit
def _row_sum_kernel(x, output, num_columns, row_stride, TILE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    # Load the row as a tile, add it up, store one number at output + row.
