"""`hidden @ weight.T` for one or two rows: a matrix product that is nothing but reading the weight.

    weight [out_size, in_size]              hidden [num_tokens, in_size], one or two rows
      |== program 0: COLUMNS rows ==|         shared by all programs, from the L2 cache
      |== program 1 ================|
      |   DEPTH elements at a time  |  -> products in registers, summed once at the end

With one token in a step each weight is used for one multiplication. A tensor core would
work on a sixteenth of its tile; the library's choice for a single token is at times a tile made
for many, which leaves most of the GPU waiting. Here nothing but loads matters: no shared memory, no
pipeline to fill, all of a strip's loads under way at once.

It saves time where steps are small, a single request above all; beyond `MAX_TOKENS` the
library is as fast, and is called.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .backend import ceil_div, runs_triton, tl, triton
from .tiles import LinearTile, linear_tile

MAX_TOKENS = 2


def skinny_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """`hidden @ weight.T + bias`, accumulated in fp32.

    hidden: `[num_tokens, in_size]`, rows contiguous; weight: `[out_size, in_size]`, contiguous;
    bias: `[out_size]` or None. Returns `[num_tokens, out_size]`.
    """
    num_tokens, in_size = hidden.shape
    out_size = weight.shape[0]
    if not runs_triton(hidden) or not 1 <= num_tokens <= MAX_TOKENS:
        return skinny_linear_torch(hidden, weight, bias)
    tile = tile or linear_tile()
    output = hidden.new_empty(num_tokens, out_size)
    _skinny_linear_kernel[(ceil_div(out_size, tile.columns),)](
        hidden, weight, bias, output,
        out_size, hidden.stride(0),
        NUM_TOKENS=num_tokens,
        IN_SIZE=in_size,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return output


@triton.jit
def _skinny_linear_kernel(
    hidden, weight, bias, output,
    out_size, hidden_stride,
    NUM_TOKENS: tl.constexpr,
    IN_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    mask = columns < out_size
    rows = weight + tl.minimum(columns, out_size - 1).to(tl.int64)[:, None] * IN_SIZE
    biases = tl.zeros([COLUMNS], dtype=tl.float32)
    if HAS_BIAS:
        biases = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    for token in tl.static_range(NUM_TOKENS):  # the weight comes from the L1 cache after the first
        products = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
        for start in tl.static_range(0, IN_SIZE, DEPTH):
            inputs = hidden + token * hidden_stride + start + depth
            weights = rows + start + depth[None, :]
            if start + DEPTH <= IN_SIZE:
                x = tl.load(inputs)
                w = tl.load(weights)
            else:
                x = tl.load(inputs, mask=start + depth < IN_SIZE, other=0.0)
                w = tl.load(weights, mask=(start + depth < IN_SIZE)[None, :], other=0.0)
            products += x.to(tl.float32)[None, :] * w.to(tl.float32)
        result = (tl.sum(products, 1) + biases).to(output.dtype.element_ty)
        tl.store(output + token * out_size + columns, result, mask=mask)


def skinny_linear_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """The specification of `skinny_linear`."""
    return F.linear(hidden, weight, bias)
