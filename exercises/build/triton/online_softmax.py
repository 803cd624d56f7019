"""Step 3: softmax of rows that are longer than a tile, with two numbers to remember.

A tile lives in registers; a row of 100,000 scores does not fit. So the row is read tile by tile,
twice. The first time finds the maximum and the sum of exponentials *together*: when a tile brings a
larger maximum, what was summed under the old one is scaled down (online softmax).

    TILE = 4     | 1 3 2 0 | 5 1 4 2 | 1 1 . . |
    row_max          3         5         5
    rescale          0      exp(3-5)     1            exp(old row_max - new row_max)
    row_sum        1.55      1.65      1.68           row_sum * rescale + sum of exp(x - row_max)

The second time each tile is read again, and exp(x - row_max) / row_sum is stored.

One trap: a tile may hold nothing but -inf, since attention hides scores that way. If it is the
first, row_max is still -inf, and -inf - -inf is no number. Begin with a row_max that is very small
but finite.

    python -m exercises.build triton 3
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def online_softmax(x: torch.Tensor, output: torch.Tensor, tile: int) -> None:
    """Write the softmax of each row of x, `[num_rows, num_columns]`, to output, of that shape.

    Args:
        tile: columns that are read at a time, a power of two.
    """
    raise NotImplementedError(
        "write the body of _online_softmax_kernel: two loops `for start in range(0, num_columns, "
        "TILE)` with columns = start + tl.arange(0, TILE). Then delete this `raise`."
    )
    num_rows, num_columns = x.shape
    _online_softmax_kernel[(num_rows,)](
        x, output, num_columns, x.stride(0), output.stride(0), TILE=tile
    )


@triton.jit
def _online_softmax_kernel(x, output, num_columns, x_stride, output_stride, TILE: tl.constexpr):
    row = tl.program_id(0)
    row_max, row_sum = -1.0e30, 0.0
    # First loop: row_max and row_sum. tl.maximum(a, b) is the larger of two.
    # Second loop: store each tile of output.
