"""Solutions of the Triton course: the kernels, which take the place of those in its files."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_sum_kernel(x, output, num_columns, row_stride, TILE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    tile = tl.load(x + row * row_stride + columns, mask=columns < num_columns, other=0.0)
    tl.store(output + row, tl.sum(tile, 0))


@triton.jit
def _row_softmax_kernel(x, output, num_columns, x_stride, output_stride, TILE: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    mask = columns < num_columns
    tile = tl.load(x + row * x_stride + columns, mask=mask, other=-float("inf"))
    weights = tl.exp(tile - tl.max(tile, 0))
    tl.store(output + row * output_stride + columns, weights / tl.sum(weights, 0), mask=mask)


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


@triton.jit
def _split_kernel(
    query, keys, values, partial_output, partial_lse, num_tokens, scale,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    tokens_of_a_split = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = part * tokens_of_a_split
    end = tl.minimum(begin + tokens_of_a_split, num_tokens)
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(query + dims)
    row_max, row_sum = -1.0e30, 0.0
    accumulator = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        mask = tokens < end
        places = tokens[:, None] * HEAD_DIM + dims[None, :]
        key_tile = tl.load(keys + places, mask=mask[:, None], other=0.0)
        value_tile = tl.load(values + places, mask=mask[:, None], other=0.0)
        scores = tl.where(mask, tl.sum(key_tile * q[None, :], 1) * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        rescale, weights = tl.exp(row_max - new_max), tl.exp(scores - new_max)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * value_tile, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    tl.store(partial_lse + part, row_max + tl.log(row_sum))  # -inf without a token: log(0)
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(partial_output + part * HEAD_DIM + dims, result)


@triton.jit
def _merge_kernel(
    partial_output, partial_lse, output, num_splits,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    parts = tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    mask = parts < num_splits
    lse = tl.load(partial_lse + seq * num_splits + parts, mask=mask, other=-float("inf"))
    largest = tl.maximum(tl.max(lse, 0), -1.0e30)  # finite, even if no part has a token
    weights = tl.exp(lse - largest)
    places = (seq * num_splits + parts)[:, None] * HEAD_DIM + dims[None, :]
    outputs = tl.load(partial_output + places, mask=mask[:, None], other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(weights[:, None] * outputs, 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + seq * HEAD_DIM + dims, result)


@triton.jit
def _paged_split_kernel(
    query, key_cache, value_cache, block_table, context_lens, partial_output, partial_lse,
    table_stride, scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    seq, part = tl.program_id(0), tl.program_id(1)
    num_splits = tl.num_programs(1)
    context_len = tl.load(context_lens + seq)
    num_blocks = tl.cdiv(context_len, BLOCK_SIZE)
    blocks_of_a_split = tl.cdiv(num_blocks, num_splits)
    begin = part * blocks_of_a_split
    end = tl.minimum(begin + blocks_of_a_split, num_blocks)
    dims, offsets = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    q = tl.load(query + seq * HEAD_DIM + dims)
    row_max, row_sum = -1.0e30, 0.0
    accumulator = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for index in range(begin, end):
        block = tl.load(block_table + seq * table_stride + index)
        mask = index * BLOCK_SIZE + offsets < context_len
        places = (block * BLOCK_SIZE + offsets)[:, None] * HEAD_DIM + dims[None, :]
        keys = tl.load(key_cache + places, mask=mask[:, None], other=0.0)
        values = tl.load(value_cache + places, mask=mask[:, None], other=0.0)
        scores = tl.where(mask, tl.sum(keys * q[None, :], 1) * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        rescale, weights = tl.exp(row_max - new_max), tl.exp(scores - new_max)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * values, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    place = seq * num_splits + part
    tl.store(partial_lse + place, row_max + tl.log(row_sum))  # -inf without a token: log(0)
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(partial_output + place * HEAD_DIM + dims, result)
