"""Products with weights in eight bits, and what makes matrices of a checkpoint into such weights.

    tokens                     product
    1, or 1..4 where small     int8_linear: multiplied as it comes, no tensor cores
    more, in bf16              hopper_int8 (on Hopper)
    more                       int8_linear: tensor cores

A token's products do not have the same bits beside others: their number decides between tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.products import Matrix, Product, Weight
from m5_kernels.decoder.weights import Matrices
from m5_kernels.extras.hopper.device import fits_copy_engine, is_hopper
from m5_kernels.kernels.silu_mul import silu_mul
from milestone_llm.core.errors import InputError

from .hopper_int8_tiles import token_counts
from .int8_linear import int8_linear, max_int8_tokens
from .int8_weight import Int8Weight


def int8_products(device: torch.device) -> list[Product]:
    """Those that this device can have, in the order in which they are asked."""
    return [HopperInt8Product(), Int8Product()] if is_hopper(device) else [Int8Product()]


def check_quantization(hf_config: PretrainedConfig, quantization: str) -> None:
    """Refuse a model whose weights cannot be rounded.

    Raises:
        InputError: the decoder does not know the model, or it is quantised already.
    """
    try:
        DecoderConfig.from_hf(hf_config)
    except InputError as error:
        raise InputError(f'quantization="{quantization}": {error}') from None


class HopperInt8Product(Product):
    """`hopper_int8`, for as many rows as tensor cores are quicker with."""

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether there are rows enough, which begin where the copy engine wants them."""
        if not isinstance(weight, Int8Weight):
            return False
        out_size, (num_tokens, in_size) = len(weight), hidden.shape
        has_rows = num_tokens > max_int8_tokens(out_size, in_size)
        return has_rows and fits_copy_engine(hidden, out_size // (1 + is_gated))

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """As `Products.linear`, or gated as `gate_up`."""
        from .hopper_int8 import hopper_int8  # Gluon: NVIDIA's GPUs alone

        return hopper_int8(hidden, weight, bias, is_gated)

    def token_counts(self, max_tokens: int, weights: Sequence[Weight]) -> Iterable[int]:
        """Where its tiles change."""
        products = {
            (len(weight) // (1 + is_gated), weight.in_size, is_gated)
            for weight, is_gated in weights
            if isinstance(weight, Int8Weight)
        }
        return token_counts(max_tokens, products)


class Int8Product(Product):
    """`int8_linear`, for all that is left."""

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether the weight has eight bits."""
        return isinstance(weight, Int8Weight)

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """As `Products.linear`, or gated as `gate_up`."""
        output = int8_linear(hidden, weight, bias)
        return silu_mul(output) if is_gated else output


class Int8Matrices(Matrices):
    """Rounds each matrix that is multiplied with. An embedding is looked up, and stays as it is.

    Args:
        weight_class: what a matrix becomes: `Int8Weight`, or the like.
    """

    def __init__(self, weight_class: Any = Int8Weight) -> None:
        self.weight_class = weight_class

    def empty(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Matrix:
        """Room for one."""
        return self.weight_class.zeros(out_size, in_size, device)

    def fill(
        self, target: Matrix, weight: Any, part: tuple[slice, ...], dtype: torch.dtype
    ) -> None:
        """Round part of a weight. A scale is that of a whole row, so whole rows are read."""
        rows, columns = part
        target.round_from(weight[rows, :].to(dtype), columns)

    def fill_randomly(self, target: Matrix) -> None:
        """Make one up, to measure with."""
        shape = len(target), target.in_size
        target.round_from(torch.empty(shape, device=target.scale.device).normal_(std=0.02))

    def lm_head(self, embedding: torch.Tensor, is_tied: bool) -> Matrix:
        """Room for the LM head: one that is tied is a copy."""
        return self.weight_class.zeros(len(embedding), embedding.shape[1], embedding.device)

    def tie(self, lm_head: Matrix, embedding: torch.Tensor) -> None:
        """Round the embedding."""
        lm_head.round_from(embedding)
