"""Products of experts: the rows of each expert with its own weights, all experts in one launch.

    sorted_pairs [tiles, rows]          weight [num_experts, out_size, in_size]
      |== tile 0, of expert 0 ==|   x     |== COLUMNS rows of expert 0 ==|  ...   a program each
      |== tile 1, of expert 3 ==|   x     |== COLUMNS rows of expert 3 ==|  ...

One product an expert would be 128 launches, most of them with a handful of rows, and the host would
have to know how many. Here the tiles of all experts are one grid. A weight is read once by each
tile of its expert. Programs with the same rows follow each other, so these rows are in L2.

    gate_up   rows of hidden, gathered by token -> silu(gate) * up     [num_pairs, size]
    down      rows of gate_up, times the router's weight               [num_pairs, hidden_size]
    combine   the pairs of a token, summed in the order of its choices [num_tokens, hidden_size]

A program takes the weight as the long side of a tensor core's tile, as `dot_linear` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.silu_mul import gated, silu_mul_torch
from m5_kernels.kernels.triton_or_twin import ceil_div, next_power_of_2, tl, triton

from .sorting import SortedPairs
from .swiglu import ClampedSwiGLU, clamped_swiglu
from .tiles import GroupedTile


def grouped_gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    pairs: SortedPairs,
    top_k: int,
    tile: GroupedTile,
    launch: Launch = PLAIN,
    bias: torch.Tensor | None = None,
    swiglu: ClampedSwiGLU | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up of each pair, `[num_pairs, size]`.

    hidden: `[num_tokens, in_size]`, rows contiguous; weight: `[num_experts, 2 * size, in_size]`,
    contiguous, the gates of an expert first; bias: `[num_experts, 2 * size]`, contiguous, or None.
    swiglu: what is computed instead of silu(gate) * up.
    """
    size = weight.shape[1] // 2
    output = hidden.new_empty(len(hidden) * top_k, size)
    _launch(hidden, weight, bias, output, pairs, None, size, top_k, tile, launch, swiglu)
    return output


def grouped_down(
    neurons: torch.Tensor,
    weight: torch.Tensor,
    pairs: SortedPairs,
    topk_weights: torch.Tensor,
    tile: GroupedTile,
    launch: Launch = PLAIN,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of each pair times its weight, `[num_pairs, out_size]`.

    neurons: `[num_pairs, in_size]`; weight: `[num_experts, out_size, in_size]`, both contiguous;
    topk_weights: fp32 `[num_tokens, top_k]`; bias: `[num_experts, out_size]`, contiguous, or None.
    """
    output = neurons.new_empty(len(neurons), weight.shape[1])
    size = weight.shape[1]
    _launch(neurons, weight, bias, output, pairs, topk_weights, size, 1, tile, launch)
    return output


def _launch(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    pairs: SortedPairs,
    factors: torch.Tensor | None,
    size: int,
    top_k: int,
    tile: GroupedTile,
    launch: Launch,
    swiglu: ClampedSwiGLU | None = None,
) -> None:
    in_size, max_tiles = weight.shape[2], len(pairs.tile_experts)
    if not max_tiles:
        return
    launch.kernel(_grouped_kernel, (max_tiles * ceil_div(size, tile.columns),))(
        states, weight, bias, output, *pairs, factors,
        states.stride(0), size,
        IN_SIZE=in_size,
        TOP_K=top_k,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.num_stages,
        IS_GATED=factors is None,
        ALPHA=swiglu and swiglu.alpha,
        LIMIT=swiglu and swiglu.limit,
        num_warps=tile.num_warps,
        **launch.pdl_options(),
    )  # fmt: skip


@triton.jit
def _grouped_kernel(
    states, weight, bias, output, sorted_pairs, tile_experts, factors,
    stride, size,
    IN_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(size, COLUMNS)
    tile = tl.program_id(0) // num_blocks
    columns = tl.program_id(0) % num_blocks * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    wait_for_previous(PDL)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    pairs = tl.load(sorted_pairs + tile * ROWS + tl.arange(0, ROWS))
    if expert < 0:
        return
    is_pair = pairs >= 0
    tokens = (tl.maximum(pairs, 0) // TOP_K).to(tl.int64)
    rows = states + tokens[:, None] * stride + depth[None, :]
    first = expert * size * (2 if IS_GATED else 1)
    outputs = tl.minimum(columns, size - 1)
    weights = weight + (first + outputs)[:, None] * IN_SIZE + depth[None, :]
    sums = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    ups = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in tl.range(0, IN_SIZE, DEPTH, num_stages=STAGES):
        if IN_SIZE % DEPTH == 0:
            h = tl.load(rows + start, mask=is_pair[:, None], other=0.0)
            w = tl.load(weights + start)
            if IS_GATED:
                up = tl.load(weights + size * IN_SIZE + start)
        else:
            is_there = (start + depth < IN_SIZE)[None, :]
            h = tl.load(rows + start, mask=is_pair[:, None] & is_there, other=0.0)
            w = tl.load(weights + start, mask=is_there, other=0.0)
            if IS_GATED:
                up = tl.load(weights + size * IN_SIZE + start, mask=is_there, other=0.0)
        h = tl.trans(h)
        sums = tl.dot(w, h, sums, input_precision="ieee")
        if IS_GATED:
            ups = tl.dot(up, h, ups, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + first + outputs).to(tl.float32)[:, None]
        if IS_GATED:
            ups += tl.load(bias + first + size + outputs).to(tl.float32)[:, None]
    if IS_GATED:
        dtype = output.dtype.element_ty
        if LIMIT is None:
            result = gated(sums.to(dtype), ups.to(dtype))
        else:
            result = clamped_swiglu(sums, ups, ALPHA, LIMIT)
    else:
        result = sums * tl.load(factors + pairs, mask=is_pair, other=0.0)[None, :]
    pointers = output + tl.maximum(pairs, 0).to(tl.int64)[None, :] * size + columns[:, None]
    mask = (columns < size)[:, None] & is_pair[None, :]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=mask)


def combine(
    outputs: torch.Tensor,
    top_k: int,
    shared: torch.Tensor | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return the sum of each token's pairs, and of `shared`, in fp32 and in this order.

    outputs: `[num_tokens * top_k, size]`; shared: `[num_tokens, size]`, both contiguous.
    """
    num_tokens, size = len(outputs) // top_k, outputs.shape[1]
    output = outputs.new_empty(num_tokens, size)
    block = min(1024, next_power_of_2(size))
    if num_tokens:
        launch.kernel(_combine_kernel, (num_tokens, ceil_div(size, block)))(
            outputs, shared, output, size,
            TOP_K=top_k, BLOCK=block, num_warps=4, **launch.pdl_options(),
        )  # fmt: skip
    return output


@triton.jit
def _combine_kernel(
    outputs, shared, output, size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = outputs + (token * TOP_K + choice) * size + columns
        total += tl.load(pair, mask=mask, other=0.0).to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * size + columns, total.to(output.dtype.element_ty), mask=mask)


def experts_torch(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu: ClampedSwiGLU | None = None,
) -> torch.Tensor:
    """Specify what the experts of a layer compute, one expert after another.

    It asks the device which experts were met, so no graph can hold it.
    """
    num_tokens, top_k = topk_ids.shape
    ids = topk_ids.flatten()
    order = ids.argsort(stable=True)
    counts = ids.bincount(minlength=len(gate_up)).tolist()
    outputs = hidden.new_empty(num_tokens * top_k, hidden.shape[1])
    none = (None,) * len(gate_up)
    experts = zip(
        counts,
        gate_up,
        none if gate_up_bias is None else gate_up_bias,
        down,
        none if down_bias is None else down_bias,
        strict=True,
    )
    start = 0
    for count, first, first_bias, second, second_bias in experts:
        if count:
            pairs = order[start : start + count]
            start += count
            neurons = F.linear(hidden[pairs // top_k], first, first_bias)
            outputs[pairs] = F.linear((swiglu or silu_mul_torch)(neurons), second, second_bias)
    weighted = outputs.view(num_tokens, top_k, -1) * topk_weights[..., None]
    total = weighted.sum(1)
    return (total if shared is None else total + shared).to(hidden.dtype)
