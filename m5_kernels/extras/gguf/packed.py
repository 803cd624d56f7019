"""A matrix in words of four bits, with a scale and a minimum for each 32 columns, and its products.

    weight = word * scale + minimum                 of a group of 32 columns of a row

    Q4_1    both as the file has them
    Q4_0    minimum = -8 * scale
    Q8_0    an integer of eight bits is 16 * high + low, two words: so the matrix is twice as wide,
            its high words and then its low ones, and is multiplied with the inputs twice over

torch has a product of bf16 with such words, which unpacks them on their way to the registers. It is
a private function; where it is missing or does not fit, and where there are so many rows that
unpacking is little work beside multiplying, the weights are unpacked and multiplied as ever.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from milestone_llm.core.errors import InputError

GROUP = 32
"""Columns with one scale."""
MANY_ROWS = 112
"""From so many on it is faster to unpack a matrix and multiply as ever: measured, see
`docs/m5_cpu.md`."""


@dataclass
class Words:
    """What a file holds of a matrix; its rows come last, so that all of them have neighbours in
    memory with which they are unpacked at once.

    words: uint8 `[num_groups, 16, out_size]`: a group's columns 0 to 15 in the low halves of its
    bytes, 16 to 31 in the high ones. scale, minimum: fp32 `[num_groups, 1, out_size]`.
    """

    words: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[num_groups * GROUP, out_size]`."""
        num_groups, half, out_size = self.words.shape
        scale, minimum = self.scale.to(dtype), self.minimum.to(dtype)
        weights = torch.empty(num_groups, GROUP, out_size, dtype=dtype)
        torch.addcmul(minimum, (self.words & 15).to(dtype), scale, out=weights[:, :half])
        torch.addcmul(minimum, (self.words >> 4).to(dtype), scale, out=weights[:, half:])
        return weights.flatten(0, 1)


@dataclass
class PackedMatrix:
    """A matrix `[out_size, in_size]`, or, until it is multiplied with, those that lie in it below
    each other. `stored` has in_size columns, or twice as many: see the top of this file."""

    out_size: int
    in_size: int
    stored: Words | None = None
    parts: list[PackedMatrix] = field(default_factory=list)

    def __len__(self) -> int:
        return self.out_size

    def __getitem__(self, rows: slice) -> PackedMatrix:
        assert rows == slice(self.out_size), "matrices of a file are whole"
        return self

    def split(self, sizes: list[int]) -> list[PackedMatrix]:
        """Those that lie in it below each other, of so many rows each."""
        self.parts = [PackedMatrix(size, self.in_size) for size in sizes]
        return self.parts

    @functools.cached_property
    def whole(self) -> Words:
        """All of it in one piece."""
        if self.stored is not None:
            return self.stored
        of_parts, self.parts = [part.whole for part in self.parts], []
        if len({len(part.words) for part in of_parts}) > 1:
            raise InputError(
                'quantization="gguf" needs as many bits in query, key and value, and in gate '
                "and up; this file has four for one of them and eight for another"
            )
        return Words(
            torch.cat([part.words for part in of_parts], dim=-1),
            torch.cat([part.scale for part in of_parts], dim=-1),
            torch.cat([part.minimum for part in of_parts], dim=-1),
        )

    @functools.cached_property
    def num_copies(self) -> int:
        """How often the inputs stand beside each other in a product."""
        return len(self.whole.words) * GROUP // self.in_size

    @functools.cached_property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Words in the order that torch's product wants, and bf16 `[num_groups, out_size, 2]`,
        scale and weight of the word 8. None: it cannot have this matrix."""
        if self.out_size % 16 or not has_packed_product():
            return None
        words, scale, minimum = self.whole.words, self.whole.scale, self.whole.minimum
        single = torch.cat((words & 15, words >> 4), dim=1).flatten(0, 1).T.int()
        scales = torch.cat((scale, minimum + 8 * scale), dim=1).mT.bfloat16()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(single.contiguous(), 1)
        return packed, scales.contiguous()

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden @ weight.T + bias`; hidden: `[num_tokens, in_size]`, fast in bf16 alone."""
        inputs = hidden if self.num_copies == 1 else hidden.repeat(1, self.num_copies)
        few = hidden.shape[0] < MANY_ROWS and hidden.dtype == torch.bfloat16
        if few and self.packed is not None:
            words, scales = self.packed
            output = torch.ops.aten._weight_int4pack_mm_for_cpu(inputs, words, GROUP, scales)
        else:
            output = inputs @ self.whole.weights(hidden.dtype)
        return output if bias is None else output.add_(bias)


@functools.cache
def has_packed_product() -> bool:
    """Whether this torch has the private functions, and they compute what is said above."""
    words = torch.arange(16 * GROUP, dtype=torch.int32).view(16, GROUP) % 16
    scales = torch.ones(1, 16, 2, dtype=torch.bfloat16)
    hidden = torch.eye(GROUP, dtype=torch.bfloat16)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(words, 1)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(hidden, packed, GROUP, scales)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product.T.float(), words - 8.0 + 1)
