"""Weights of eight bits on a CPU: integers in their order, and torch's product for few rows.

The numbers are those of `extras.int8`: scale times integer, a scale a row. torch's product takes
bf16 inputs and scales, so beside bf16 a scale is the next larger one that bf16 has. It is a private
function; where it is missing, and where there are so many rows that unpacking is little work beside
multiplying, the integers are made into numbers and multiplied as ever.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from m5_kernels.extras.int8.int8_weight import LARGEST, ROWS_AT_ONCE

MANY_ROWS = 32
"""From so many on it is faster to unpack: measured, see `docs/m5_cpu.md`."""
READS = 32
"""Columns that torch's product may read at a time: it does not stop at the end of a row."""


@dataclass(frozen=True)
class CPUInt8Weight:
    """A matrix as integers of eight bits and a scale a row."""

    integers: torch.Tensor
    """int8 `[out_size, in_size]`."""
    scale: torch.Tensor
    """fp32 `[out_size]`."""

    @classmethod
    def zeros(cls, out_size: int, in_size: int, device: torch.device | str) -> CPUInt8Weight:
        """Room for a matrix."""
        integers = torch.zeros(out_size, in_size, dtype=torch.int8, device=device)
        return cls(integers, torch.ones(out_size, device=device))

    def round_from(self, weight: torch.Tensor, columns: slice = slice(None)) -> None:
        """Fill with `columns` of a matrix, each rounded to the nearest of its row's steps."""
        parts = (each.split(ROWS_AT_ONCE) for each in (weight, self.integers, self.scale))
        for rows, integers, scale in zip(*parts, strict=True):
            exact = rows.float()
            scale.copy_(exact.abs().amax(1) / LARGEST)
            if weight.dtype == torch.bfloat16:
                rounded = scale.bfloat16()
                above = rounded.nextafter(torch.tensor(torch.inf, dtype=torch.bfloat16))
                scale.copy_(torch.where(rounded.float() < scale, above, rounded))
            scale[scale == 0] = 1
            integers.copy_((exact / scale[:, None]).round()[:, columns])

    @property
    def in_size(self) -> int:
        """Columns."""
        return self.integers.shape[1]

    def __len__(self) -> int:
        return len(self.integers)

    def __getitem__(self, rows: slice) -> CPUInt8Weight:
        return CPUInt8Weight(self.integers[rows], self.scale[rows])

    def split(self, sizes: list[int]) -> list[CPUInt8Weight]:
        """Parts of so many rows each, which share its memory."""
        pairs = zip(self.integers.split(sizes), self.scale.split(sizes), strict=True)
        return [CPUInt8Weight(*pair) for pair in pairs]

    @functools.cached_property
    def bf16_scale(self) -> torch.Tensor:
        """The scale, in which nothing is lost."""
        return self.scale.bfloat16()

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden @ weight.T + bias`; hidden: `[num_tokens, in_size]`, fast in bf16 alone."""
        few = hidden.shape[0] < MANY_ROWS and hidden.dtype == torch.bfloat16
        if few and self.in_size % READS == 0 and has_int8_product():
            output = torch._weight_int8pack_mm(hidden, self.integers, self.bf16_scale)
        else:
            output = F.linear(hidden, self.integers.to(hidden.dtype)).mul_(
                self.scale.to(hidden.dtype)
            )
        return output if bias is None else output.add_(bias)


@functools.cache
def has_int8_product() -> bool:
    """Whether this torch has the private function, and it computes what is said above."""
    integers = torch.arange(-64, 64, dtype=torch.int8).view(4, 32)
    scale = torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=torch.bfloat16)
    try:
        product = torch._weight_int8pack_mm(torch.eye(32, dtype=torch.bfloat16), integers, scale)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product.T, integers * scale[:, None])
