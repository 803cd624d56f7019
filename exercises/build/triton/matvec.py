"""Step 4: a matrix times a vector. Each program makes some rows of the output.

A tile can have two dimensions. `rows[:, None]` is a column of numbers, `columns[None, :]` a row,
and their sum is a table of all pairs:

    matrix [5, 6]           pointers  matrix + rows[:, None] * row_stride + columns[None, :]
    TILE_ROWS = 2           mask      (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    TILE_COLUMNS = 4
          columns 0..3   4..7
    program 0   | # # # # | # # . . |      each program walks along its rows, tile by tile, and
    program 1   | # # # # | # # . . |      adds up tile * vector: tl.sum(..., 1) makes one number
    program 2   | # # # # | # # . . |      of each row of a tile
                | . . . . | . . . . |      program 2 has one row only

Scores of a query against all keys are such a product: the keys are the matrix. And a decode step is
little else: each weight is read once and used once.

Weights are float16 or bfloat16. A sum in float16 soon is too coarse to grow: convert what you load
(`.to(tl.float32)`), and add in float32.

    python -m exercises.build triton 4
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def matvec(
    matrix: torch.Tensor, vector: torch.Tensor, output: torch.Tensor, tile: tuple[int, int]
) -> None:
    """Write matrix `[num_rows, num_columns]` times vector `[num_columns]` to output `[num_rows]`.

    Args:
        tile: rows of a program, and columns that it reads at a time; powers of two.
    """
    raise NotImplementedError(
        "write the body of _matvec_kernel: a loop over the columns that adds up in a tile "
        "tl.zeros([TILE_ROWS], dtype=tl.float32). Then delete this `raise`."
    )
    num_rows, num_columns = matrix.shape
    _matvec_kernel[(triton.cdiv(num_rows, tile[0]),)](
        matrix, vector, output, num_rows, num_columns, matrix.stride(0),
        TILE_ROWS=tile[0],
        TILE_COLUMNS=tile[1],
    )  # fmt: skip


@triton.jit
def _matvec_kernel(
    matrix, vector, output, num_rows, num_columns, row_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    # Load, multiply and add tile by tile. The store needs a mask: the last program has fewer rows.
