"""A solution of step 4 of the Triton course."""

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
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    for start in range(0, num_columns, TILE_COLUMNS):
        columns = start + tl.arange(0, TILE_COLUMNS)
        pointers = matrix + rows[:, None] * row_stride + columns[None, :]
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        numbers = tl.load(vector + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        total += tl.sum(tile * numbers[None, :], 1)
    tl.store(output + rows, total, mask=rows < num_rows)
