"""Linear layers with weights in e4m3: who multiplies, and in how many bits.

    tokens   activations                 product
    1        as they are                 `one_row_fp8`: only reads the weight, half of bf16's bytes
    more     e4m3, a scale for a token   the library's: tensor cores multiply 8 bits twice as fast

The LM head keeps the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from m5_kernels.decoder.linear import LinearMethod, LinearWeight, Weight
from m5_kernels.decoder.ops import DecoderOps
from m5_kernels.kernels.launch import PLAIN, Launch
from milestone_llm.core.errors import InputError

from .fp8_checkpoint import ScaledWeight, StoredScales
from .fp8_one_row import one_row_fp8
from .fp8_rows import RoundedRows, ScaledRows, add_norm, round_rows, silu_mul_rounded
from .fp8_weight import Fp8Rows, Fp8Weight


@dataclass(frozen=True)
class Fp8Linear(LinearMethod):
    """Rounds weights to e4m3, and with several tokens activations too. Not those of the LM head."""

    most_error: float | None = 0.5
    """The most that was seen is 0.43, with 36 layers of random weights."""
    exact: LinearMethod = field(default_factory=LinearMethod)
    """For the LM head."""
    is_fused: bool = False
    """Whether a product of several tokens returns `ScaledRows`, for the operations of `fp8_ops`."""
    stored: StoredScales | None = None
    """Scales of a checkpoint that is in e4m3 already."""

    # -- weights -----------------------------------------------------------------------------

    def joined(self, weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        """Return weights of a checkpoint, each with its scales if it is stored with some."""
        return weights if self.stored is None else self.stored.joined(weights)

    def create(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Weight:
        """Return memory for a weight.

        Raises:
            InputError: the library's product cannot take a weight of this size.
        """
        if torch.device(device).type == "cuda" and (out_size % 16 or in_size % 16):
            raise InputError(
                f'quantization="fp8": sizes of weights must be multiples of 16, and one is '
                f"{out_size} x {in_size}"
            )
        return Fp8Weight(out_size, in_size, dtype, device)

    def load(
        self, target: Weight, weight: Any, part: tuple[slice, ...], dtype: torch.dtype
    ) -> None:
        """Round a weight, once all parts of a merged one are there."""
        if isinstance(target, Fp8Rows):
            exact = weight[part]
            target.fill(exact if isinstance(weight, ScaledWeight) else exact.to(dtype))
        else:
            self.exact.load(target, weight, part, dtype)

    def load_randomly(self, target: Weight) -> None:
        """Fill a created weight, or rows of one, with random numbers, to measure with."""
        if not isinstance(target, Fp8Rows):
            self.exact.load_randomly(target)
            return
        values, rows = target.weight.values, target.rows
        shape = rows.stop - rows.start, values.shape[1]
        target.fill(torch.empty(shape, device=values.device).normal_(std=0.02).bfloat16())

    # -- products ----------------------------------------------------------------------------

    def apply(
        self,
        hidden: Any,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> Any:
        """Return `hidden @ weight.T + bias`: a tensor, or `ScaledRows`."""
        if not isinstance(weight, Fp8Weight):
            return self.exact.apply(hidden, weight, bias, launch)
        if isinstance(hidden, torch.Tensor):
            if len(hidden) <= 1:
                return one_row_fp8(hidden, weight, bias, launch=launch)
            hidden = round_rows(hidden, launch)
        product = product_fp8(hidden, weight)
        if bias is not None:
            product = product.plus(bias)
        return product if self.is_fused else product.multiplied()

    def gate_up(
        self,
        hidden: Any,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> Any:
        """Return silu(gate) * up of what `apply` returns: a tensor, or `RoundedRows`."""
        if isinstance(hidden, torch.Tensor) and len(hidden) <= 1:
            return one_row_fp8(hidden, weight, bias, is_gated=True, launch=launch)
        product = self.apply(hidden, weight, bias, launch)
        return (
            silu_mul_rounded(product, launch) if self.is_fused else self.activate(product, launch)
        )

    # -- what a step's launches ask ----------------------------------------------------------

    def starts_early(self, num_tokens: int, weight: Weight) -> bool:
        """Return whether there is one token: `one_row_fp8` reads weights before it waits."""
        return num_tokens == 1 and self.exact.starts_early(num_tokens, weight)

    def token_counts(self, max_tokens: int, weights: Sequence[LinearWeight]) -> Iterable[int]:
        """Return 2: from there on other kernels compute the step."""
        return (*self.exact.token_counts(max_tokens, weights), 2)


def product_fp8(hidden: RoundedRows, weight: Fp8Weight) -> ScaledRows:
    """Return the product of rows and a weight in e4m3."""
    if not hidden.values.is_cuda:
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = F.linear(hidden.values.to(wide), weight.values.to(wide)) * weight.scale
        return ScaledRows(product.to(weight.dtype), hidden.scale)
    product = torch._scaled_mm(
        hidden.values, weight.values.t(), weight.one, weight.scale, out_dtype=weight.dtype
    )
    return ScaledRows(product, hidden.scale)


def fp8_ops(ops: DecoderOps, stored: StoredScales | None) -> DecoderOps:
    """Return operations with which linear layers compute in 8 bits."""

    def norm(rounds: bool, hidden: Any, residual: torch.Tensor, *args: Any) -> Any:
        if isinstance(hidden, torch.Tensor):  # of one token
            return ops.add_norm(hidden, residual, *args)
        weight, epsilon, launch = args
        return add_norm(hidden, residual, weight, epsilon, launch, rounds)

    def rope(qkv: Any, *args: Any) -> torch.Tensor:
        if isinstance(qkv, torch.Tensor):
            return ops.rope_kv_write(qkv, *args)
        return ops.rope_kv_write(qkv.values, *args, row_scale=qkv.scale)

    return replace(
        ops,
        linear=Fp8Linear(exact=ops.linear, is_fused=True, stored=stored),
        add_norm=partial(norm, True),
        last_norm=partial(norm, False),
        rope_kv_write=rope,
    )
