"""A weight in 8 bits: integers, and a scale for each row.

    integers [out_size, in_size]    from -127 to 127
    scale    [out_size]             fp32: the largest weight of the row is 127 times it

Bytes are loaded four at a time, as a word, and four columns that are 16 apart share a word. So the
lowest bytes of 16 words are 16 columns in order, as tensor cores need them.

    columns   0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63        a row's first 64
    word 0    0         16         32         48              lowest byte first
    word 1     1         17         33         49
    ...
    word 15         15         31         47         63
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from m5_kernels.kernels.triton_or_twin import ceil_div, tl

LARGEST = 127
"""The largest integer. -128 is not used, so that a weight and its negative have equal errors."""
GROUP = 64
"""Columns that share 16 words."""
NUM_ARRIVALS = 198
"""Warpgroups that compute parts of a product, at most. A tile has three, and there is one tile for
every two multiprocessors, since each is computed in two parts or more."""
ROWS_AT_ONCE = 4096
"""Rows that are rounded together. In fp32 they take four times the memory of the result."""


@dataclass(frozen=True)
class Int8Weight:
    """A weight as 8-bit integers, with a scale for each row."""

    words: torch.Tensor
    """int32 `[out_size, in_size / 4]`, with in_size rounded up to whole groups."""
    scale: torch.Tensor
    """fp32 `[out_size]`."""
    in_size: int
    arrivals: torch.Tensor
    """int32 `[NUM_ARRIVALS]`, zero between launches: how many parts of each tile are done."""

    @classmethod
    def zeros(cls, out_size: int, in_size: int, device: torch.device | str) -> Int8Weight:
        """Return memory for a weight."""
        num_words = ceil_div(in_size, GROUP) * GROUP // 4
        words = torch.zeros(out_size, num_words, dtype=torch.int32, device=device)
        arrivals = torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)
        return cls(words, torch.ones(out_size, device=device), in_size, arrivals)

    def round_from(self, weight: torch.Tensor, columns: slice = slice(None)) -> None:
        """Fill with `columns` of a weight, each number rounded to a multiple of its row's scale.

        weight: whole rows. Several GPUs that have parts of a row use the scale of the whole row.
        """
        parts = (tensor.split(ROWS_AT_ONCE) for tensor in (weight, self.words, self.scale))
        for rows, words, scale in zip(*parts, strict=True):
            exact = rows.to(scale.device).float()
            scale.copy_(exact.abs().amax(1) / LARGEST)
            scale[scale == 0] = 1
            integers = (exact[:, columns] / scale[:, None]).round().to(torch.int8)
            whole = F.pad(integers, (0, 4 * words.shape[1] - self.in_size))
            words.copy_(
                whole.unflatten(1, (-1, 4, 16)).mT.contiguous().view(torch.int32).flatten(1)
            )

    @property
    def integers(self) -> torch.Tensor:
        """The integers, unpacked: int8 `[out_size, in_size]`."""
        whole = self.words.view(torch.int8).unflatten(1, (-1, 16, 4)).mT.flatten(1)
        return whole[:, : self.in_size]

    def sorted_as_bytes(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return inputs `[num_tokens, in_size]` in the order of the integers in the words."""
        whole = F.pad(hidden, (0, 4 * self.words.shape[1] - self.in_size))
        return whole.unflatten(1, (-1, 4, 16)).mT.flatten(1)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, rows: slice) -> Int8Weight:
        return Int8Weight(self.words[rows], self.scale[rows], self.in_size, self.arrivals)

    def split(self, sizes: list[int]) -> list[Int8Weight]:
        """Return parts of so many rows each, which share its memory."""
        pairs = zip(self.words.split(sizes), self.scale.split(sizes), strict=True)
        return [Int8Weight(*pair, self.in_size, self.arrivals) for pair in pairs]


def int8_linear_torch(
    hidden: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Specify `int8_linear`: sums, scale and bias in fp32, then rounded once."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    inputs, integers = weight.sorted_as_bytes(hidden), weight.words.view(torch.int8)
    product = F.linear(inputs.to(exact), integers.to(exact)) * weight.scale
    return (product if bias is None else product + bias).to(hidden.dtype)


WORD_TO_FP32 = tl.constexpr(
    """{
    .reg .b32 turned;
    xor.b32 turned, $4, 0x80808080;
    prmt.b32 $0, turned, 0x4b000000, 0x7440;
    prmt.b32 $1, turned, 0x4b000000, 0x7441;
    prmt.b32 $2, turned, 0x4b000000, 0x7442;
    prmt.b32 $3, turned, 0x4b000000, 0x7443;
    sub.f32 $0, $0, 0f4b000080;
    sub.f32 $1, $1, 0f4b000080;
    sub.f32 $2, $2, 0f4b000080;
    sub.f32 $3, $3, 0f4b000080;
    }"""
)
"""PTX that converts the four integers of a word. Each byte, with its highest bit flipped, becomes
the last byte of 2^23 + 128 + the integer."""
WORDS_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 both<4>, minus<4>;
    prmt.b32 both0, $4, $5, 0x0400;
    prmt.b32 both1, $4, $5, 0x0501;
    prmt.b32 both2, $4, $5, 0x0602;
    prmt.b32 both3, $4, $5, 0x0703;
    lop3.b32 minus0, both0, 0x00800080, 0x43004300, 0xea;
    lop3.b32 minus1, both1, 0x00800080, 0x43004300, 0xea;
    lop3.b32 minus2, both2, 0x00800080, 0x43004300, 0xea;
    lop3.b32 minus3, both3, 0x00800080, 0x43004300, 0xea;
    lop3.b32 both0, both0, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 both1, both1, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 both2, both2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 both3, both3, 0x007f007f, 0x43004300, 0xea;
    sub.rn.bf16x2 $0, both0, minus0;
    sub.rn.bf16x2 $1, both1, minus1;
    sub.rn.bf16x2 $2, both2, minus2;
    sub.rn.bf16x2 $3, both3, minus3;
    }"""
)
"""PTX that converts two words together, so that two bf16 share a register. The low seven bits of a
byte become the last bits of 128 + them. Then 128 is subtracted, or 256 if the highest bit is set.
"""
