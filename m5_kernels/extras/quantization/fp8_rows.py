"""Activations in e4m3 with a scale for each token: made by the kernels that write a token's row.

    norm, SiLU * mul                         product                        norm, RoPE, SiLU * mul
    row / scale  ->  RoundedRows             values @ weight.T              ScaledRows: row * scale

A factor of a row commutes with the product, so the product itself knows nothing of it, and is the
library's fastest. Who reads the result multiplies.

    add_norm      residual += row * scale; norm; a new scale        one program, one token
    silu_mul      gate and up times scale; a new scale              one program, one token
    round_rows    what attention returns

The largest number of a row must be known before its first is rounded, so a program has a whole row.
A row of gates and ups comes in blocks. In one block of 16,384 columns, the next power of two,
12,288 would leave a quarter of the lanes without work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.rms_norm import add_rms_norm_torch, norm_of_row
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.kernels.triton_or_twin import ceil_div, next_power_of_2, tl, triton

from .fp8_weight import E4M3, LARGEST

LEAST = 1e-30
"""The largest number of a row counts as at least this, so that 448 / it is finite."""
MOST_COLUMNS = 4096
"""Gates, and as many ups, that `silu_mul_rounded` computes at once."""
_LEAST, _LARGEST = tl.constexpr(LEAST), tl.constexpr(LARGEST)


class RoundedRows(NamedTuple):
    """Rows that a product reads: `values * scale[:, None]`."""

    values: torch.Tensor
    """e4m3 `[num_tokens, size]`."""
    scale: torch.Tensor
    """fp32 `[num_tokens]`."""

    @classmethod
    def empty(cls, num_tokens: int, size: int, device: torch.device) -> RoundedRows:
        """Return memory for rows."""
        values = torch.empty(num_tokens, size, dtype=E4M3, device=device)
        return cls(values, torch.empty(num_tokens, device=device))

    @classmethod
    def round(cls, rows: torch.Tensor) -> RoundedRows:
        """Specify how rows are rounded."""
        wide = rows.float()
        largest = wide.abs().amax(1).clamp(min=LEAST)
        values = (wide * (LARGEST / largest)[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)
        return cls(values, largest / LARGEST)


class ScaledRows(NamedTuple):
    """Rows that a product returns: `values * scale[:, None]`."""

    values: torch.Tensor
    """In the model's dtype, `[num_tokens, size]`."""
    scale: torch.Tensor
    """fp32 `[num_tokens]`."""

    def multiplied(self) -> torch.Tensor:
        """Return what the rows are, in their dtype."""
        return (self.values.float() * self.scale[:, None]).to(self.values.dtype)

    def plus(self, bias: torch.Tensor) -> ScaledRows:
        """Return the rows with a bias `[size]` added to each, in fp32."""
        sums = self.values.float() * self.scale[:, None] + bias
        return ScaledRows(sums.to(self.values.dtype), torch.ones_like(self.scale))


def round_rows(rows: torch.Tensor, launch: Launch = PLAIN) -> RoundedRows:
    """Return rows `[num_tokens, size]`, rounded."""
    num_tokens, size = rows.shape
    if not num_tokens or not launch.runs_triton(rows):
        return RoundedRows.round(rows)
    rounded = RoundedRows.empty(num_tokens, size, rows.device)
    launch.kernel(_round_rows_kernel, (num_tokens,))(
        rows, *rounded, rows.stride(0), size,
        ROW=next_power_of_2(size), num_warps=8, **launch.pdl_options(),
    )  # fmt: skip
    return rounded


def silu_mul_rounded(gate_up: ScaledRows, launch: Launch = PLAIN) -> RoundedRows:
    """Return silu(gate) * up of rows `[num_tokens, 2 * size]`, computed in fp32, rounded once."""
    values, factors = gate_up
    if not len(values) or not launch.runs_triton(values):
        return RoundedRows.round(silu_mul_torch(values.float() * factors[:, None]))
    num_tokens, size = values.shape[0], values.shape[1] // 2
    rounded = RoundedRows.empty(num_tokens, size, values.device)
    block = min(MOST_COLUMNS, next_power_of_2(size))
    launch.kernel(_silu_mul_kernel, (num_tokens,))(
        values, factors, *rounded, values.stride(0), size,
        BLOCK=block, NUM_BLOCKS=ceil_div(size, block), num_warps=16, **launch.pdl_options(),
    )  # fmt: skip
    return rounded


def add_norm(
    hidden: ScaledRows,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
    rounds: bool = True,
) -> RoundedRows | torch.Tensor:
    """Do what `add_rms_norm` does with rows of a product, and round the result if `rounds`."""
    if not len(residual) or not launch.runs_triton(residual):
        normed = add_rms_norm_torch(hidden.multiplied(), residual, weight, epsilon)
        return RoundedRows.round(normed) if rounds else normed
    num_tokens, size = residual.shape
    rounded = RoundedRows.empty(num_tokens, size, residual.device) if rounds else None
    output = rounded.values if rounded else torch.empty_like(hidden.values)
    row = next_power_of_2(size)
    launch.kernel(_add_norm_kernel, (num_tokens,))(
        *hidden, residual, weight, output, rounded.scale if rounded else None,
        hidden.values.stride(0), residual.stride(0), epsilon,
        HIDDEN_SIZE=size, ROW=row,
        num_warps=min(16, max(1, row // 512)), **launch.pdl_options(),
    )  # fmt: skip
    return rounded or output


@triton.jit
def _round_rows_kernel(rows, values, scales, stride, size, ROW: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, ROW)
    mask = columns < size
    row = tl.load(rows + token * stride + columns, mask=mask, other=0.0).to(tl.float32)
    _store_rounded(row, values + token * size + columns, scales + token, mask)


@triton.jit
def _silu_mul_kernel(
    gate_up, factors, values, scales, stride, size,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + token)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    blocks = tl.tuple(())
    for block in tl.static_range(NUM_BLOCKS):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        pointers = gate_up + token * stride + columns
        gate = tl.load(pointers, mask=columns < size, other=0.0).to(tl.float32) * factor
        up = tl.load(pointers + size, mask=columns < size, other=0.0).to(tl.float32) * factor
        neurons = gate * tl.sigmoid(gate) * up
        largest = _larger(largest, tl.abs(neurons))
        blocks += (neurons,)
    of_row = _largest(largest)
    for block in tl.static_range(NUM_BLOCKS):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        rounded = _rounded(blocks[block], of_row)
        tl.store(values + token * size + columns, rounded, mask=columns < size)
    tl.store(scales + token, of_row / _LARGEST)


@triton.jit
def _add_norm_kernel(
    hidden, factors, residual, weight, output, scales,
    hidden_stride, residual_stride, epsilon,
    HIDDEN_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, ROW)
    mask = columns < HIDDEN_SIZE
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    row = tl.load(hidden + token * hidden_stride + columns, mask=mask, other=0.0)
    row = (row.to(tl.float32) * tl.load(factors + token)).to(row.dtype).to(tl.float32)
    pointers = residual + token * residual_stride + columns
    total = row + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    total = total.to(residual.dtype.element_ty)
    tl.store(pointers, total, mask=mask)
    normed = norm_of_row(total, weights, epsilon, HIDDEN_SIZE)
    places = output + token * HIDDEN_SIZE + columns
    if scales is None:
        tl.store(places, normed, mask=mask)
    else:
        _store_rounded(normed.to(tl.float32), places, scales + token, mask)


@triton.jit
def _store_rounded(row, values, scale_place, mask):
    """Store a row in e4m3, and its scale."""
    largest = _largest(tl.abs(row))
    tl.store(values, _rounded(row, largest), mask=mask)
    tl.store(scale_place, largest / _LARGEST)


@triton.jit
def _largest(sizes):
    """Return the largest of a row of positive numbers: NaN if there is one, and at least LEAST."""
    return _larger(tl.reduce(sizes, 0, _larger), _LEAST)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded(row, largest):
    return (row * (_LARGEST / largest)).to(tl.float8e4nv)
