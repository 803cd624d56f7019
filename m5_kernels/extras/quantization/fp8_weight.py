"""A weight in e4m3: a sign, four bits of exponent, three of fraction, and one scale for all of it.

    weight[row, column]  =  scale * values[row, column]        largest |value| 448, smallest 2^-9

Each number has an exponent of its own. So a scale for each row, which integers need, would make the
weights no more exact, and with one scale the library's fastest product takes them as they are.
Format: Micikevicius et al., FP8 Formats for Deep Learning (2022).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number in e4m3. A larger one would become NaN."""


class Fp8Weight:
    """A weight in 8 bits, with one scale. It may be filled part by part, in any order.

    Its scale is known once all of its rows are there. Until then they are kept as they came.

    Attributes:
        values: e4m3 `[out_size, in_size]`.
        scale: fp32 scalar.
        dtype: the model's, in which products are returned.
        one: fp32 scalar, the scale of activations in the product.
    """

    def __init__(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.dtype = dtype
        self.values = torch.zeros(out_size, in_size, dtype=E4M3, device=device)
        self.scale, self.one = torch.ones((), device=device), torch.ones((), device=device)
        self._exact: torch.Tensor | None = None
        self._num_filled = 0

    def fill(self, rows: slice, exact: torch.Tensor) -> None:
        """Fill rows. The last ones round all of them."""
        if self._exact is None:
            self._exact = torch.empty(
                self.values.shape, dtype=exact.dtype, device=self.values.device
            )
        self._exact[rows].copy_(exact)
        self._num_filled += len(exact)
        if self._num_filled == len(self):
            self.round_from(self._exact)
            self._exact, self._num_filled = None, 0

    def round_from(self, exact: torch.Tensor) -> None:
        """Fill all of the weight."""
        largest = exact.abs().amax().float()
        self.scale.copy_(torch.where(largest > 0, largest / LARGEST, 1.0))
        for values, part in zip(self.values.split(4096), exact.split(4096), strict=True):
            values.copy_((part.float() / self.scale).clamp(-LARGEST, LARGEST))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> Fp8Rows:
        return Fp8Rows(self, slice(*rows.indices(len(self))[:2]))

    def split(self, sizes: list[int]) -> list[Fp8Rows]:
        """Return parts of so many rows each, to be filled."""
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [self[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class Fp8Rows:
    """Rows of a weight that are to be filled."""

    def __init__(self, weight: Fp8Weight, rows: slice) -> None:
        self.weight, self.rows = weight, rows

    def fill(self, exact: torch.Tensor) -> None:
        """Fill the rows."""
        self.weight.fill(self.rows, exact)


def fp8_linear_torch(
    hidden: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Specify linear layers with such a weight: sums, scale and bias in fp32, then rounded once."""
    exact: Any = torch.promote_types(hidden.dtype, torch.float32)
    product = F.linear(hidden.to(exact), weight.values.to(exact)) * weight.scale
    return (product if bias is None else product + bias).to(hidden.dtype)
