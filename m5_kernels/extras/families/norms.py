"""What is between two linear layers of a family: two norms, an addition and its multiplier.

    part      [num_tokens, hidden_size]   -> norm (after) -> x multiplier --+
    residual  [num_tokens, hidden_size]   ----------------------------------+--> sum, in place
    output    [num_tokens, hidden_size]   <- norm (before the next layer) <-+

The lesson's `add_rms_norm` is this without the first norm and the multiplier. A family may lack
either norm. Then the next linear layer reads the residual stream itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.triton_or_twin import next_power_of_2, tl, triton

ROUNDED, EXACT, LAYER = 0, 1, 2
"""Kinds of norms: RMSNorm that rounds before it multiplies by the weight, or only after it
(`Family.norm`), and LayerNorm."""


@dataclass(frozen=True)
class NormWeight:
    """The weight of a norm, fp32 `[hidden_size]`, and the bias of a LayerNorm."""

    kind: int
    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class FamilyNorm:
    """Takes the place of the weight that `embed_norm` and `add_norm` get in the lesson."""

    after: NormWeight | None
    """Norm of what attention or MLP returned, before it is added to the residual stream."""
    before: NormWeight | None
    """Norm of the sum, for the next linear layer."""
    multiplier: float = 1.0
    """Factor of what is added."""
    positions: torch.Tensor | None = None
    """Embeddings of positions, `[max_positions, hidden_size]`, added to those of the tokens."""
    is_parallel: bool = False
    """`before` is the norm of the residual stream as it was before the addition: the MLP reads what
    attention has read."""


def embed_norm(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    norm: FamilyNorm,
    epsilon: float,
    launch: Launch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the embedding times the multiplier, and their norm.

    Both are `[num_tokens, hidden_size]`, and the same tensor if there is no norm.
    """
    if not launch.runs_triton(embedding):
        rows = F.embedding(input_ids, embedding)
        if norm.positions is not None:
            rows = rows + F.embedding(positions, norm.positions)
        return _twin(rows, None, norm, epsilon)
    residual = embedding.new_empty(len(input_ids), embedding.shape[1])
    return residual, _norm(embedding, residual, norm, epsilon, input_ids, positions, launch)


def add_norm(
    part: torch.Tensor,
    residual: torch.Tensor,
    norm: FamilyNorm,
    epsilon: float,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Add `part`, after its norm and times the multiplier, to `residual`; return the sum's norm.

    part, residual: `[num_tokens, hidden_size]`, rows contiguous; residual is changed in place, and
    returned if there is no norm.
    """
    if not launch.runs_triton(part):
        return _twin(part, residual, norm, epsilon)[1]
    return _norm(part, residual, norm, epsilon, None, None, launch)


def _norm(
    part: torch.Tensor,
    residual: torch.Tensor,
    norm: FamilyNorm,
    epsilon: float,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    launch: Launch,
) -> torch.Tensor:
    num_tokens, hidden_size = residual.shape
    after, before = norm.after, norm.before
    output = residual if before is None else torch.empty_like(residual)
    row = next_power_of_2(hidden_size)
    if num_tokens:
        launch.kernel(_family_norm_kernel, (num_tokens,))(
            input_ids, None if norm.positions is None else positions, norm.positions,
            part, residual, output,
            after and after.weight, before and before.weight, before and before.bias,
            part.stride(0), residual.stride(0), epsilon, float(norm.multiplier),
            HIDDEN_SIZE=hidden_size,
            ROW=row,
            AFTER=after.kind if after else ROUNDED,
            BEFORE=before.kind if before else ROUNDED,
            IS_PARALLEL=norm.is_parallel,
            num_warps=min(16, max(1, row // 512)),
            # See `wait_for_previous`: the kernel that reads the embedding is the first of a step's.
            **launch.pdl_options(waits_for_launch=input_ids is not None),
        )  # fmt: skip
    return output


@triton.jit
def _family_norm_kernel(
    input_ids, positions, position_table, part, residual, output, after, before, bias,
    part_stride, residual_stride, epsilon, multiplier,
    HIDDEN_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    AFTER: tl.constexpr,
    BEFORE: tl.constexpr,
    IS_PARALLEL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, ROW)
    mask = columns < HIDDEN_SIZE
    dtype = residual.dtype.element_ty
    if after is not None:
        after_weight = tl.load(after + columns, mask=mask, other=0.0)
    if before is not None:
        weight = tl.load(before + columns, mask=mask, other=0.0)
    wait_for_previous(PDL)
    source = token if input_ids is None else tl.load(input_ids + token).to(tl.int64)
    row = tl.load(part + source * part_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if after is not None:
        row = _normed(row, after_weight, mask, epsilon, HIDDEN_SIZE, AFTER, dtype)
        row = row.to(dtype).to(tl.float32)
    row = (row * multiplier).to(dtype)
    if positions is not None:
        place = tl.load(positions + token).to(tl.int64) * HIDDEN_SIZE
        added = tl.load(position_table + place + columns, mask=mask, other=0.0)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(dtype)
    pointers = residual + token * residual_stride + columns
    if input_ids is None:
        stream = tl.load(pointers, mask=mask, other=0.0)
        row = (row.to(tl.float32) + stream.to(tl.float32)).to(dtype)
    tl.store(pointers, row, mask=mask)
    if before is not None:
        if IS_PARALLEL:
            row = stream
        result = _normed(row.to(tl.float32), weight, mask, epsilon, HIDDEN_SIZE, BEFORE, dtype)
        if bias is not None:
            result += tl.load(bias + columns, mask=mask, other=0.0)
        tl.store(output + token * HIDDEN_SIZE + columns, result.to(dtype), mask=mask)


@triton.jit
def _normed(
    values, weight, mask, epsilon,
    HIDDEN_SIZE: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the norm of a row of fp32 values, fp32, with zeros past its end."""
    if KIND == 2:
        values = tl.where(mask, values - tl.sum(values, 0) / HIDDEN_SIZE, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / HIDDEN_SIZE + epsilon)
    if KIND == 0:
        values = values.to(dtype).to(tl.float32)
    return values * weight


def _twin(
    part: torch.Tensor, residual: torch.Tensor | None, norm: FamilyNorm, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specify `embed_norm`, where residual is None, and `add_norm`: return residual and norm."""
    if norm.after is not None:
        part = norm_torch(part, norm.after, epsilon)
    if norm.multiplier != 1:
        part = part * norm.multiplier
    if norm.is_parallel:
        assert residual is not None
        assert norm.before is not None
        normed = norm_torch(residual, norm.before, epsilon)
        return residual.add_(part), normed
    residual = part if residual is None else residual.add_(part)
    return residual, residual if norm.before is None else norm_torch(residual, norm.before, epsilon)


def norm_torch(hidden: torch.Tensor, norm: NormWeight, epsilon: float) -> torch.Tensor:
    """Return the norm of `[num_tokens, hidden_size]`, rounded where Hugging Face rounds."""
    values = hidden.float()
    if norm.kind == LAYER:
        return F.layer_norm(values, norm.weight.shape, norm.weight, norm.bias, epsilon).to(hidden)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    if norm.kind == ROUNDED:
        values = values.to(hidden.dtype)
    return (values * norm.weight).to(hidden.dtype)
