"""Linear layers with weights in 8 bits: `hidden @ (scale * integers).T`.

A row's scale is the same for all of its products, so it is applied to their sum:

    sum_i  x_i * (s * q_i)  =  s * sum_i x_i * q_i

The integers are read as bytes, half of what bf16 takes, and are converted in registers to bf16 or
fp32, which represent each of them exactly. Then reading is so fast that instructions count: an H200
has time for about seven a weight. With one row, or up to four with a small weight, a program
multiplies in registers, as in `skinny_linear`, the four weights of a word at a time. With more rows
tensor cores multiply: on Hopper in `hopper_int8`, on other GPUs here, where inputs are first sorted
like the bytes of the words.

    integers                  hidden, transposed
      |== COLUMNS rows ==|      | ROWS tokens |       a program: COLUMNS x ROWS sums in fp32, DEPTH
      |   DEPTH at a time |  x  | DEPTH       |  ->   products at a time; then scale and bias
"""

from __future__ import annotations

import torch

from m5_kernels.extras.devices.few_rows_tiles import SHORT_ROW
from m5_kernels.extras.devices.register_linear import fits_registers
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import LATE, wait_for_previous
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.kernels.triton_or_twin import HAS_PTX, ceil_div, tl, triton

from .int8_tiles import Int8Tile, int8_tile, skinny_int8_tile
from .int8_weight import WORD_TO_FP32, Int8Weight, int8_linear_torch


def max_int8_tokens(out_size: int, in_size: int) -> int:
    """Return the most tokens for which multiplying in registers is faster than tensor cores."""
    if fits_registers(out_size, in_size):
        return 4
    return 0 if in_size <= SHORT_ROW else 1


def int8_linear(
    hidden: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None = None,
    tile: LinearTile | Int8Tile | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ (scale * integers).T + bias`, accumulated in fp32, `[num_tokens, out_size]`.

    hidden: `[num_tokens, in_size]`, rows contiguous; bias: `[out_size]` or None. tile: for one of
    the kernels of this file.
    """
    num_tokens, in_size = hidden.shape
    if not num_tokens or not launch.runs_triton(hidden):
        return int8_linear_torch(hidden, weight, bias)
    out_size = len(weight)
    if tile is None and num_tokens <= max_int8_tokens(out_size, in_size):
        tile = skinny_int8_tile(out_size, in_size)
    tile = tile or int8_tile(num_tokens, hidden.element_size(), hidden.device)
    output = hidden.new_empty(num_tokens, out_size)
    if isinstance(tile, LinearTile):
        launch.kernel(_skinny_int8_kernel, (ceil_div(out_size, tile.columns),))(
            hidden, weight.words, weight.scale, bias, output,
            out_size, hidden.stride(0),
            NUM_TOKENS=num_tokens,
            IN_SIZE=in_size,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.num_warps,
            **launch.pdl_options(most=LATE),
        )  # fmt: skip
        return output
    grid = ceil_div(out_size, tile.columns), ceil_div(num_tokens, tile.rows)
    inputs, integers = weight.sorted_as_bytes(hidden), weight.words.view(torch.int8)
    launch.kernel(_int8_kernel, grid)(
        inputs, integers, weight.scale, bias, output,
        num_tokens, out_size, integers.shape[1],
        COLUMNS=tile.columns,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        IS_EVEN=integers.shape[1] % tile.depth == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch.pdl_options(most=LATE),
    )  # fmt: skip
    return output


@triton.jit
def _skinny_int8_kernel(
    hidden, words, scale, bias, output,
    out_size, hidden_stride,
    NUM_TOKENS: tl.constexpr,
    IN_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    word = tl.arange(0, DEPTH // 4)
    last = tl.minimum(columns, out_size - 1).to(tl.int64)
    rows = words + last[:, None] * ((IN_SIZE + 63) // 64 * 16)
    factors = tl.load(scale + last)
    offsets = tl.zeros([COLUMNS], dtype=tl.float32)
    if bias is not None:
        offsets = tl.load(bias + last).to(tl.float32)
    w = _load_words(rows, 0, word, IN_SIZE, DEPTH)
    following = w
    if IN_SIZE > DEPTH:
        following = _load_words(rows, DEPTH, word, IN_SIZE, DEPTH)
    wait_for_previous(PDL)  # the loads of the first two parts of the weight are in flight by now
    # One sum for each row, not one tensor for all: there the number of rows would decide the order.
    sums = tl.tuple(())
    for _ in tl.static_range(NUM_TOKENS):
        sums += (tl.zeros([COLUMNS, DEPTH // 4], dtype=tl.float32),)
    for start in tl.static_range(0, IN_SIZE, DEPTH):
        if start == DEPTH:
            w = following
        elif start > DEPTH:
            w = _load_words(rows, start, word, IN_SIZE, DEPTH)
        w0, w1, w2, w3 = _as_fp32(w)
        more = tl.tuple(())
        for token in tl.static_range(NUM_TOKENS):
            x = hidden + token * hidden_stride
            more += (_add_products(sums[token], x, w0, w1, w2, w3, start, word, IN_SIZE, DEPTH),)
        sums = more
    for token in tl.static_range(NUM_TOKENS):
        row = tl.sum(sums[token], 1) * factors + offsets
        places = output + token * out_size + columns
        tl.store(places, row.to(output.dtype.element_ty), mask=columns < out_size)


@triton.jit
def _add_products(
    sums, row, w0, w1, w2, w3, start: tl.constexpr, word,
    IN_SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    places = start + word // 16 * 64 + word % 16
    sums += w0 * _load_inputs(row, places, start + DEPTH <= IN_SIZE, IN_SIZE)
    sums += w1 * _load_inputs(row, places + 16, start + DEPTH <= IN_SIZE, IN_SIZE)
    sums += w2 * _load_inputs(row, places + 32, start + DEPTH <= IN_SIZE, IN_SIZE)
    sums += w3 * _load_inputs(row, places + 48, start + DEPTH <= IN_SIZE, IN_SIZE)
    return sums


@triton.jit
def _load_words(rows, start: tl.constexpr, word, IN_SIZE: tl.constexpr, DEPTH: tl.constexpr):
    if start + DEPTH <= IN_SIZE:
        return tl.load(rows + (start // 4 + word)[None, :])
    is_there = (start // 4 + word < (IN_SIZE + 63) // 64 * 16)[None, :]
    return tl.load(rows + (start // 4 + word)[None, :], mask=is_there, other=0)


@triton.jit
def _load_inputs(row, places, IS_EVEN: tl.constexpr, IN_SIZE: tl.constexpr):
    if IS_EVEN:
        return tl.load(row + places)[None, :].to(tl.float32)
    return tl.load(row + places, mask=places < IN_SIZE, other=0.0)[None, :].to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _int8_kernel(
    hidden, integers, scale, bias, output,
    num_tokens, out_size, in_size,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    last = tl.minimum(columns, out_size - 1).to(tl.int64)
    weights = integers + last[:, None] * in_size + depth[None, :]
    inputs = hidden + rows[None, :].to(tl.int64) * in_size + depth[:, None]
    is_row = (rows < num_tokens)[None, :]
    factors = tl.load(scale + last)
    offsets = tl.zeros([COLUMNS], dtype=tl.float32)
    if bias is not None:
        offsets = tl.load(bias + last).to(tl.float32)
    wait_for_previous(PDL)
    sums = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in range(0, in_size, DEPTH):
        if IS_EVEN:
            w = tl.load(weights + start)
            x = tl.load(inputs + start, mask=is_row, other=0.0)
        else:
            is_there = start + depth < in_size
            w = tl.load(weights + start, mask=is_there[None, :], other=0)
            x = tl.load(inputs + start, mask=is_row & is_there[:, None], other=0.0)
        sums = tl.dot(w.to(x.dtype), x, sums, input_precision="ieee")
    result = (sums * factors[:, None] + offsets[:, None]).to(output.dtype.element_ty)
    places = output + rows[None, :].to(tl.int64) * out_size + columns[:, None]
    tl.store(places, result, mask=is_row & (columns < out_size)[:, None])


@triton.jit
def _as_fp32(words):
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            WORD_TO_FP32,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    w0, w1, w2, w3 = words << 24 >> 24, words << 16 >> 24, words << 8 >> 24, words >> 24
    return w0.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32), w3.to(tl.float32)
