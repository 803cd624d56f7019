"""Products of few rows, faster than the library's: which weights and numbers of rows each is for.

    weight                     tokens   product
    small, of 16 bits          1..16    register_linear: all on its way at once (from Hopper on)
    small, in bf16             17..256  hopper_linear: on its way early (on Hopper)
    of 16 bits                 2..16    dot_linear: tensor cores, by shared memory; also 1 token
                                        where many rows are short

Each adds up all tokens alike. So a token's products have the same bits alone and beside others,
where the number of tokens does not decide between two kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from m5_kernels.decoder.products import Matrix, Product, Weight
from m5_kernels.kernels.backend import HAS_TRITON, INTERPRETED
from m5_kernels.kernels.early_start import EARLY, Starts, supports_early_starts
from m5_kernels.kernels.silu_mul import silu_mul

from .device import fits_copy_engine, is_hopper
from .dot_linear import dot_linear
from .register_linear import MAX_TOKENS, fits_registers, register_linear
from .tiles import SHORT_ROW

MAX_HOPPER_TOKENS = 256
"""Up to which the library's products take longer than `hopper_linear`, measured on an H200."""


def products_of_few_rows(device: torch.device) -> list[Product]:
    """Those that this GPU can have, in the order in which they are asked."""
    products: list[Product] = []
    if supports_early_starts(device):  # it gains by what it asks for before it waits
        products.append(RegisterProduct())
    if is_hopper(device):
        products.append(HopperProduct())
    if HAS_TRITON and (device.type == "cuda" or INTERPRETED):
        products.append(DotProduct())
    return products


class RegisterProduct(Product):
    """`register_linear`, for a few rows and a small weight."""

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether the weight fits into registers."""
        return takes_registers(len(hidden), weight)

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """As `Products.linear`, or gated as `gate_up`."""
        return register_linear(hidden, weight, bias, is_gated)


class HopperProduct(Product):
    """`hopper_linear`, for rows up to some hundreds: larger weights the library reads as fast."""

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether the weight is small, and rows begin where the copy engine wants them."""
        out_size, in_size = weight.shape
        if not MAX_TOKENS < len(hidden) <= MAX_HOPPER_TOKENS:
            return False
        is_small = fits_registers(out_size, in_size)
        return is_small and fits_copy_engine(hidden, in_size, out_size // (1 + is_gated))

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """As `Products.linear`, or gated as `gate_up`."""
        from .hopper_linear import hopper_linear  # Gluon: NVIDIA's GPUs alone

        return hopper_linear(hidden, weight, bias, is_gated)

    def token_counts(self, max_tokens: int, weights: Sequence[Weight]) -> Iterable[int]:
        """Where its tiles change, and the first number that is the library's."""
        return (128, 192, MAX_HOPPER_TOKENS, MAX_HOPPER_TOKENS + 1)


class DotProduct(Product):
    """`dot_linear`, for a few rows of any weight."""

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether it was the fastest on an H200 with Qwen3's shapes.

        Of many short rows the programs of `skinny_linear` are through with each too soon.
        """
        has_short_rows = weight.shape[1] <= SHORT_ROW and len(weight) >= 4096
        fewest = 1 if has_short_rows else 2
        return weight.element_size() == 2 and fewest <= len(hidden) <= MAX_TOKENS

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """As `Products.linear`, or gated as `gate_up`."""
        output = dot_linear(hidden, weight, bias)
        return silu_mul(output) if is_gated else output


class EarlyStarts(Starts):
    """Kernels let the next one start at once, where they are so short that it pays."""

    def when(self, num_tokens: int, gate_up: Matrix) -> int:
        """EARLY, if the products of a layer are those of `register_linear`."""
        return EARLY if self.late and takes_registers(num_tokens, gate_up) else self.late


def takes_registers(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether the product of so many tokens is one for `register_linear`."""
    is_right = weight.element_size() == 2 and fits_registers(*weight.shape)
    return is_right and 1 <= num_tokens <= MAX_TOKENS
