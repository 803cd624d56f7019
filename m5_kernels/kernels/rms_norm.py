"""RMSNorm, fused with what comes before it: adding to the residual stream, or the embedding.

    hidden    [num_tokens, hidden_size]   |======== one program, one row ========|
    residual  [num_tokens, hidden_size]   |==== added to, in place, or begun ====|
                                                 mean of squares -> scale
    output    [num_tokens, hidden_size]   |========= scaled, x weight  ==========|

A row fits in the registers of one program. So it is read once, though the mean must be known before
the first element can be scaled. Fused with the addition it saves a launch and one read of
`[num_tokens, hidden_size]`, twice a layer. Fused with the embedding it saves them once a step.
Rounding follows Hugging Face: the sum is rounded to the model's dtype before the norm reads it, and
the scaled row is rounded again before it is multiplied by the weight.
Paper: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .launch import PLAIN, Launch
from .pdl import wait_for_previous
from .triton_or_twin import next_power_of_2, tl, triton


def embed_rms_norm(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Set `residual = embedding[input_ids]`, and return its norm.

    The norm of a row is `row / sqrt(mean(row ** 2) + epsilon) * weight`.
    input_ids: int32 `[num_tokens]`; embedding: `[vocab_size, hidden_size]`; weight:
    `[hidden_size]`; residual: `[num_tokens, hidden_size]`, rows contiguous, is written.
    The next kernel may start before this one ends. This one never starts early itself.
    Returns `[num_tokens, hidden_size]`, contiguous.
    """
    if not launch.runs_triton(embedding):
        return embed_rms_norm_torch(input_ids, embedding, residual, weight, epsilon)
    output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    _norm(embedding, residual, weight, output, epsilon, input_ids, launch)
    return output


def add_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Set `residual += hidden`, and return the norm of the sum.

    hidden, residual: `[num_tokens, hidden_size]`, rows contiguous; residual is changed in place.
    The kernel may start before the previous one ends. That one must not write the weight.
    Returns `[num_tokens, hidden_size]`, contiguous.
    """
    if not launch.runs_triton(hidden):
        return add_rms_norm_torch(hidden, residual, weight, epsilon)
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    _norm(hidden, residual, weight, output, epsilon, None, launch)
    return output


def _norm(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    epsilon: float,
    input_ids: torch.Tensor | None,
    launch: Launch,
) -> None:
    num_tokens, hidden_size = output.shape
    if num_tokens == 0:
        return
    row = next_power_of_2(hidden_size)
    launch.kernel(_rms_norm_kernel, (num_tokens,))(
        input_ids, hidden, residual, weight, output,
        hidden.stride(0), residual.stride(0), epsilon,
        HIDDEN_SIZE=hidden_size,
        ROW=row,
        num_warps=min(16, max(1, row // 512)),
        # See `wait_for_previous`: the kernel that reads the embedding is the first of a step's.
        **launch.pdl_options(waits_for_launch=input_ids is not None),
    )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    input_ids, hidden, residual, weight, output,
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
    source = token if input_ids is None else tl.load(input_ids + token).to(tl.int64)
    row = tl.load(hidden + source * hidden_stride + columns, mask=mask, other=0.0)
    pointers = residual + token * residual_stride + columns
    if input_ids is None:
        total = row.to(tl.float32) + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        row = total.to(row.dtype)
    tl.store(pointers, row, mask=mask)
    normed = norm_of_row(row, weights, epsilon, HIDDEN_SIZE)
    tl.store(output + token * HIDDEN_SIZE + columns, normed, mask=mask)


@triton.jit
def norm_of_row(row, weights, epsilon, HIDDEN_SIZE: tl.constexpr):
    """Return the RMSNorm of a row, whose elements past HIDDEN_SIZE are zeros. weights: fp32."""
    values = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN_SIZE + epsilon)
    return ((values * scale).to(row.dtype).to(tl.float32) * weights).to(row.dtype)


def rms_norm_torch(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute RMSNorm as Hugging Face does; the other twins use it."""
    values = hidden.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return weight * values.to(hidden.dtype)


def embed_rms_norm_torch(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Specify `embed_rms_norm`."""
    residual.copy_(F.embedding(input_ids, embedding))
    return rms_norm_torch(residual, weight, epsilon)


def add_rms_norm_torch(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Specify `add_rms_norm`."""
    residual += hidden
    return rms_norm_torch(residual, weight, epsilon)
