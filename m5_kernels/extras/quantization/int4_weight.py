"""A weight in 4-bit integers, with a scale and a minimum for each 32 columns, and its product.

    weight = integer * scale + minimum              in a group of 32 columns of a row

    4 bits  scale and minimum as the file has them; in Q4_0, the minimum is -8 * scale
    8 bits  an 8-bit integer is 16 * high + low, two 4-bit ones. So the weight is twice as wide,
            first all high ones, then all low ones, and the inputs are repeated to match

`gguf_words` says which types of a file are which.

torch has a product of bf16 with such integers, which unpacks them while it loads them into
registers. It is a private function. If it is missing or does not fit, or if there are so many rows
that unpacking is little work compared with multiplying, the weight is unpacked and multiplied as
usual.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

GROUP = 32
"""Columns that share a scale."""
MANY_ROWS = 112
"""From so many rows on it is faster to unpack a weight. Measured, see `docs/m5_cpu.md`."""


@dataclass
class Int4Groups:
    """A weight as the file holds it, transposed: its rows are the last dimension, which is
    contiguous, so that all of them are unpacked at once.

    nibbles: uint8 `[num_groups, 16, out_size]`: a group's columns 0 to 15 in the low halves of its
    bytes, 16 to 31 in the high ones. scale, minimum: fp32 `[num_groups, 1, out_size]`.
    """

    nibbles: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    @classmethod
    def merged(cls, parts: list[Int4Groups]) -> Int4Groups:
        """Return the groups of a weight whose rows are those of some weights with as many bits."""
        if len(parts) == 1:
            return parts[0]
        each = ([part.nibbles for part in parts], [part.scale for part in parts],
                [part.minimum for part in parts])  # fmt: skip
        return cls(*(torch.cat(tensors, dim=-1) for tensors in each))

    def widened(self) -> Int4Groups:
        """Return the same numbers in eight bits, whose high halves are nothing."""
        each = self.nibbles, self.scale, self.minimum
        return Int4Groups(*(torch.cat((torch.zeros_like(own), own)) for own in each))

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers `[num_groups * GROUP, out_size]`.

        In float32 they are the file's own, to the last bit. In fewer bits the minimum would be
        rounded before most of it is cancelled. So integers go from -8 to 7, and what is added is
        the number that 8 stands for, which is small.
        """
        num_groups, half, out_size = self.nibbles.shape
        zero = 0 if dtype == torch.float32 else 8
        scale, added = self.scale.to(dtype), (self.minimum + zero * self.scale).to(dtype)
        weights = torch.empty(num_groups, GROUP, out_size, dtype=dtype)

        def integers(nibbles: torch.Tensor) -> torch.Tensor:
            return nibbles.view(torch.int8).sub_(zero).to(dtype)

        torch.addcmul(added, integers(self.nibbles & 15), scale, out=weights[:, :half])
        torch.addcmul(added, integers(self.nibbles >> 4), scale, out=weights[:, half:])
        return weights.flatten(0, 1)


@dataclass
class Int4Weight:
    """A weight `[out_size, in_size]`. A merged weight keeps its parts until it is used.

    `stored` has in_size columns, or twice as many: see the top of this file.
    """

    out_size: int
    in_size: int
    stored: Int4Groups | None = None
    parts: list[Int4Weight] = field(default_factory=list)

    def __len__(self) -> int:
        return self.out_size

    def __getitem__(self, rows: slice) -> Int4Weight:
        assert rows == slice(self.out_size), "matrices of a file are whole"
        return self

    def split(self, sizes: list[int]) -> list[Int4Weight]:
        """Return parts of so many rows each, from which this weight is merged."""
        self.parts = [Int4Weight(size, self.in_size) for size in sizes]
        return self.parts

    @functools.cached_property
    def whole(self) -> Int4Groups:
        """The groups of the whole weight, merged from its parts."""
        if self.stored is not None:
            return self.stored
        of_parts, self.parts = [part.whole for part in self.parts], []
        most = max(len(part.nibbles) for part in of_parts)
        return Int4Groups.merged(
            [part if len(part.nibbles) == most else part.widened() for part in of_parts]
        )

    @functools.cached_property
    def num_copies(self) -> int:
        """How often the inputs are repeated in a product."""
        return len(self.whole.nibbles) * GROUP // self.in_size

    @functools.cached_property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The integers in the order that torch's product needs, and bf16
        `[num_groups, out_size, 2]`: the scale, and the value of the integer 8. None: torch's
        product does not support this weight."""
        if self.out_size % 16 or not has_packed_product():
            return None
        nibbles, scale, minimum = self.whole.nibbles, self.whole.scale, self.whole.minimum
        single = torch.cat((nibbles & 15, nibbles >> 4), dim=1).flatten(0, 1).T.int()
        scales = torch.cat((scale, minimum + 8 * scale), dim=1).mT.bfloat16()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(single.contiguous(), 1)
        return packed, scales.contiguous()

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`. hidden: `[num_tokens, in_size]`, only fast in bf16."""
        inputs = hidden if self.num_copies == 1 else hidden.repeat(1, self.num_copies)
        few = hidden.shape[0] < MANY_ROWS and hidden.dtype == torch.bfloat16
        if few and self.packed is not None:
            nibbles, scales = self.packed
            output = torch._weight_int4pack_mm_for_cpu(inputs, nibbles, GROUP, scales)
        else:
            output = inputs @ self.whole.weights(hidden.dtype)
        return output if bias is None else output.add_(bias)


@functools.cache
def has_packed_product() -> bool:
    """Return whether this torch has the private functions, and they compute what is said above."""
    nibbles = torch.arange(16 * GROUP, dtype=torch.int32).view(16, GROUP) % 16
    scales = torch.ones(1, 16, 2, dtype=torch.bfloat16)
    hidden = torch.eye(GROUP, dtype=torch.bfloat16)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
        product = torch._weight_int4pack_mm_for_cpu(hidden, packed, GROUP, scales)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product.T.float(), nibbles - 8.0 + 1)
