"""Weights of 8 bits on a CPU: int8 rows in their order, and torch's product for few rows.

The numbers are those of `int8_weight`: a scale for each row, times an integer. torch's product
takes inputs and scales in bf16, so for a bf16 weight a scale is rounded up to the next bf16 number.
The product is a private function of torch. The integers are converted and multiplied as usual if it
is missing, or if there are so many rows that unpacking is little work compared with multiplying.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from m5_kernels.extras.devices.cpu_linear import silu_mul_in_place
from m5_kernels.kernels.launch import Launch

from .int8_method import Int8Linear
from .int8_weight import LARGEST, ROWS_AT_ONCE

MANY_ROWS = 32
"""From so many rows on it is faster to unpack. Measured, see `docs/m5_cpu.md`."""
READS = 32
"""Columns that torch's product may read at a time. It does not stop at the end of a row."""


@dataclass(frozen=True)
class CPUInt8Weight:
    """A weight as 8-bit integers, with a scale for each row."""

    integers: torch.Tensor
    """int8 `[out_size, in_size]`."""
    scale: torch.Tensor
    """fp32 `[out_size]`."""

    @classmethod
    def zeros(cls, out_size: int, in_size: int, device: torch.device | str) -> CPUInt8Weight:
        """Return memory for a weight."""
        integers = torch.zeros(out_size, in_size, dtype=torch.int8, device=device)
        return cls(integers, torch.ones(out_size, device=device))

    def round_from(self, weight: torch.Tensor, columns: slice = slice(None)) -> None:
        """Fill with `columns` of a weight, each number rounded to a multiple of its row's scale."""
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
        """Number of columns."""
        return self.integers.shape[1]

    def __len__(self) -> int:
        return len(self.integers)

    def __getitem__(self, rows: slice) -> CPUInt8Weight:
        return CPUInt8Weight(self.integers[rows], self.scale[rows])

    def split(self, sizes: list[int]) -> list[CPUInt8Weight]:
        """Return parts of so many rows each, which share its memory."""
        pairs = zip(self.integers.split(sizes), self.scale.split(sizes), strict=True)
        return [CPUInt8Weight(*pair) for pair in pairs]

    @functools.cached_property
    def bf16_scale(self) -> torch.Tensor:
        """The scale in bf16, which is exact."""
        return self.scale.bfloat16()

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`. hidden: `[num_tokens, in_size]`, only fast in bf16."""
        few = hidden.shape[0] < MANY_ROWS and hidden.dtype == torch.bfloat16
        if few and self.in_size % READS == 0 and has_int8_product():
            output = torch._weight_int8pack_mm(hidden, self.integers, self.bf16_scale)
        else:
            output = F.linear(hidden, self.integers.to(hidden.dtype)).mul_(
                self.scale.to(hidden.dtype)
            )
        return output if bias is None else output.add_(bias)


def cpu_int8_linear(
    hidden: torch.Tensor,
    weight: CPUInt8Weight,
    bias: torch.Tensor | None,
    is_gated: bool,
    launch: Launch,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` or, if `is_gated`, silu(gate) * up of that."""
    output = weight.product(hidden, bias)
    return silu_mul_in_place(output) if is_gated else output


CPU_INT8 = Int8Linear(weight_class=CPUInt8Weight, linear=cpu_int8_linear)


@functools.cache
def has_int8_product() -> bool:
    """Return whether this torch has the private function, and it computes what is said above."""
    integers = torch.arange(-64, 64, dtype=torch.int8).view(4, 32)
    scale = torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=torch.bfloat16)
    try:
        product = torch._weight_int8pack_mm(torch.eye(32, dtype=torch.bfloat16), integers, scale)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product.T, integers * scale[:, None])
