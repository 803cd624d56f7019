"""`hidden @ weight.T` for up to 16 rows and a small weight, all of which is loaded at once.

    weight [out_size, in_size]                      hidden [num_tokens, in_size]
      |== program 0: COLUMNS rows, all inputs ==|     padded to 8 or 16 rows, from the L2 cache
      |== program 1 ============================|
      |w0|w1|w2|w3|w0|w1|..  32 inputs a warp       the warps' sums are added up at the end

A linear layer of a few rows takes as long as reading the weight. A small weight is read in two or
three microseconds, so what takes time is waiting. So each program loads its whole part of the
weight before it waits for the previous kernel, and keeps it in registers until hidden is there.

The weight goes from memory into the registers of the lanes that multiply it. A tensor core needs
four pairs of a row in a lane, and these are apart in memory. Here a lane loads eight neighbours
instead. That is another order of the inputs, which does not matter, since both factors have it. So
nothing goes through shared memory, and no warp waits for another before the end.

All rows are summed in the same order, however many there are: a token computed next to draft tokens
gets the same bits as if computed alone.

With `part_size` the order is also one that kernels for many rows can follow (`batch_invariant`): a
chunk is a part of neighbouring inputs, taken 16 at a time, and parts are added from first to last.
"""

from __future__ import annotations

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.silu_mul import gated
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.kernels.triton_or_twin import ceil_div, tl, triton

from .few_rows_tiles import register_tile

MAX_TOKENS = 16
MAX_ELEMENTS = 2**23
"""Elements of a weight. Reading a larger one takes so long that the order of reads decides."""
PARTS_AT_ONCE = 8
"""Parts that are summed at the same time, each by a warp of its own."""
MAX_ROW = 3072
"""Elements of a row of the weight. There are no registers for more."""


def fits_registers(out_size: int, in_size: int) -> bool:
    """Return whether this kernel is the fastest for a weight of that size."""
    return out_size * in_size <= MAX_ELEMENTS and in_size <= MAX_ROW


def register_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
    part_size: int | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias`, or silu(gate) * up of it.

    For at most `MAX_TOKENS` rows in fp16 or bf16. part_size: inputs of a part, a multiple of 16.
    """
    num_tokens, in_size = hidden.shape
    size = len(weight) // 2 if is_gated else len(weight)
    tile = tile or register_tile(in_size)
    output = hidden.new_empty(num_tokens, size)
    num_programs = ceil_div(size, tile.columns // 2 if is_gated else tile.columns)
    launch.kernel(_register_linear_kernel, (num_programs,))(
        hidden, weight, bias, output,
        num_tokens, size, hidden.stride(0),
        IN_SIZE=in_size,
        TOKENS=8 if num_tokens <= 8 else 16,
        COLUMNS=tile.columns,
        CHUNKS=PARTS_AT_ONCE if part_size else tile.depth // 32,
        PART=part_size or 0,
        IS_GATED=is_gated,
        num_warps=PARTS_AT_ONCE if part_size else tile.num_warps,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_tokens"])
def _register_linear_kernel(
    hidden, weight, bias, output,
    num_tokens, size, hidden_stride,
    IN_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PART: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # A lane loads so many neighbours of a row. A chunk loads those of four lanes in each step.
    EACH: tl.constexpr = 4 if PART else 8
    SPAN: tl.constexpr = PART if PART else 4 * EACH  # from a chunk to the next
    OUTPUTS: tl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
    first = tl.program_id(0) * OUTPUTS
    column, inputs = _places(COLUMNS, CHUNKS, EACH, SPAN)
    rows = column // OUTPUTS * size + tl.minimum(first + column % OUTPUTS, size - 1)
    weights = weight + rows.to(tl.int64) * IN_SIZE + inputs
    steps = tl.tuple(())
    for start in tl.static_range(0, IN_SIZE, CHUNKS * SPAN):
        for step in tl.static_range(start, start + SPAN, 4 * EACH):
            if start + CHUNKS * SPAN <= IN_SIZE:
                steps += (tl.load(weights + step),)
            else:
                steps += (tl.load(weights + step, mask=step + inputs < IN_SIZE, other=0.0),)
    wait_for_previous(PDL)
    token, inputs = _places(TOKENS, CHUNKS, EACH, SPAN)
    states = hidden + token * hidden_stride + inputs
    sums = tl.zeros([CHUNKS, COLUMNS, TOKENS], dtype=tl.float32)
    result = tl.zeros([COLUMNS, TOKENS], dtype=tl.float32)
    for start in tl.static_range(0, IN_SIZE, CHUNKS * SPAN):
        for step in tl.static_range(start, start + SPAN, 4 * EACH):
            is_there = token < num_tokens
            if start + CHUNKS * SPAN > IN_SIZE:
                is_there = is_there & (step + inputs < IN_SIZE)
            h = tl.load(states + step, mask=is_there, other=0.0)
            w = steps[start // (CHUNKS * 4 * EACH) + (step - start) // (4 * EACH)]
            w = _as_lanes_multiply(w, COLUMNS, CHUNKS, EACH)
            h = tl.permute(_as_lanes_multiply(h, TOKENS, CHUNKS, EACH), [0, 2, 1])
            sums = tl.dot(w, h, sums, input_precision="ieee")
        if PART:
            result = _add_in_order(result, sums)
            sums = tl.zeros([CHUNKS, COLUMNS, TOKENS], dtype=tl.float32)
    if not PART:
        result = tl.sum(sums, 0)
    if bias is not None:
        column = tl.arange(0, COLUMNS)
        rows = column // OUTPUTS * size + tl.minimum(first + column % OUTPUTS, size - 1)
        result += tl.load(bias + rows).to(tl.float32)[:, None]
    result = result.to(output.dtype.element_ty)
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUTPUTS, TOKENS]), [1, 2, 0]))
        result = gated(gate, up)
    columns = first + tl.arange(0, OUTPUTS)[:, None]
    tokens = tl.arange(0, TOKENS)[None, :]
    mask = (columns < size) & (tokens < num_tokens)
    tl.store(output + tokens * size + columns, result, mask=mask)


@triton.jit
def _places(ROWS: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr, SPAN: tl.constexpr):
    """Return row and input of each element of a tile `[ROWS * CHUNKS, 4 * EACH]`.

    The compiler deals out a tile to the 32 lanes of a warp as four next to each other, with `EACH`
    inputs each, and eight below each other. So eight rows follow each other, then other inputs of
    the same rows.
    """
    index = tl.arange(0, ROWS * CHUNKS)[:, None]
    row = index // (8 * CHUNKS) * 8 + index % 8
    inputs = index // 8 % CHUNKS * SPAN + tl.arange(0, 4 * EACH)[None, :]
    return row, tl.max_contiguous(inputs, [1, EACH])


@triton.jit
def _as_lanes_multiply(tile, ROWS: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr):
    """Return the tile as `[CHUNKS, ROWS, 4 * EACH]`, in an order of inputs in which no lane needs
    another's.

    Of 16 inputs a tensor core takes those at 2i, 2i + 1, 2i + 8 and 2i + 9 from lane i. Here these
    are four neighbours that lane i has loaded. With eight, the next four are of the next 16.
    """
    tile = tl.reshape(tile, [ROWS // 8, CHUNKS, 8, 4, EACH // 4, 2, 2])
    return tl.reshape(tl.permute(tile, [1, 0, 2, 4, 5, 3, 6]), [CHUNKS, ROWS, 4 * EACH])


@triton.jit
def _add_in_order(total, sums):
    """Add the sums, from first to last. `tl.sum` has an order of its own."""
    COUNT: tl.constexpr = sums.shape[0]
    parts = tl.tuple((tl.permute(sums, [1, 2, 0]),))
    for _ in tl.static_range(COUNT):
        if len(parts) < COUNT:
            parts = _halves(parts)
    for part in tl.static_range(COUNT):
        total += tl.reshape(parts[part], total.shape)
    return total


@triton.jit
def _halves(parts):
    """Return first and second half of the last dimension of each."""
    SIZE: tl.constexpr = parts[0].shape[2] // 2
    halves = tl.tuple(())
    for part in tl.static_range(len(parts)):
        pair = tl.reshape(parts[part], [parts[0].shape[0], parts[0].shape[1], 2, SIZE])
        halves += tl.split(tl.permute(pair, [0, 1, 3, 2]))
    return halves
