"""From the bytes of a GGUF matrix to the words that have a product: 4-bit integers in groups of 32.

    Q4_0, Q4_1, Q4_K         4 bits, with a scale and a minimum for each 32 columns: as they are
    Q5_0, Q5_1, Q5_K, Q8_0   8 bits, which are two integers of 4 bits: the same numbers
    Q6_K, F16, BF16, ...     rounded to 8 bits, with a scale for each 32 columns

The layouts are those of llama.cpp's `ggml-quants`. A block of a K-quant has 256 columns: eight
groups of 32, whose scales and minima have 6 bits and are in units of the block's own two numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from milestone_llm.core.errors import InputError

from .int4_weight import GROUP, Int4Groups

ROWS_AT_ONCE = 4096
"""Rows that are unpacked together: what they need for it is then small."""


def int4_groups(data: Tensor, kind: str, num_columns: int) -> Int4Groups:
    """Return the words of a matrix.

    Args:
        data: its bytes, uint8 `[num_rows, bytes_of_a_row]`.
        kind: its type, as gguf calls it.

    Raises:
        InputError: it has no whole groups of 32 columns.
    """
    if num_columns % GROUP:
        raise InputError(f"a row of {num_columns} columns has no whole groups of {GROUP}")
    read = EXACT.get(kind)
    parts = [
        read(rows) if read is not None else _rounded(dequantized(rows, kind))
        for rows in data.split(ROWS_AT_ONCE)
    ]
    return Int4Groups.merged(parts)


def dequantized(data: Tensor, kind: str) -> Tensor:
    """Return the numbers of a matrix or a vector in fp32, from its bytes."""
    import gguf  # an extra of the package

    array = data.numpy()
    if kind in ("F32", "F16"):
        array = array.view(np.float32 if kind == "F32" else np.float16)
    return torch.from_numpy(
        np.ascontiguousarray(gguf.dequantize(array, gguf.GGMLQuantizationType[kind]))
    )


# -- integers are [num_rows, num_groups, 32]; scale and others fp32 [num_rows, num_groups, 1] -----


def _four_bits(integers: Tensor, scale: Tensor, minimum: Tensor) -> Int4Groups:
    """Pack integers from 0 to 15; a weight is integer * scale + minimum."""
    half = GROUP // 2
    nibbles = integers[..., :half] | integers[..., half:] << 4
    return Int4Groups(*(each.permute(1, 2, 0).contiguous() for each in (nibbles, scale, minimum)))


def _eight_bits(integers: Tensor, scale: Tensor, middle: Tensor | None = None) -> Int4Groups:
    """Pack integers from -128 to 127; a weight is integer * scale + middle. First come all high
    halves, then all low ones. A high half of 8 stands for `middle`, which is small."""
    shifted = (integers.int() + 128).byte()
    none = torch.zeros_like(scale)
    high = _four_bits(shifted >> 4, 16 * scale, (none if middle is None else middle) - 128 * scale)
    low = _four_bits(shifted & 15, scale, none)
    return Int4Groups(
        torch.cat((high.nibbles, low.nibbles)),
        torch.cat((high.scale, low.scale)),
        torch.cat((high.minimum, low.minimum)),
    )


def _rounded(numbers: Tensor) -> Int4Groups:
    """Round numbers to 8 bits. The scale is one of bf16, in which the product has it."""
    groups = numbers.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1, keepdim=True) / 127).bfloat16().float()
    integers = (groups / scale.clamp(min=1e-30)).round().clamp(-128, 127)
    return _eight_bits(integers.to(torch.int8), scale)


def _halves(data: Tensor) -> Tensor:
    """Return the low halves of a group's bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _fp16(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


def _blocks(data: Tensor, num_bytes: int) -> Tensor:
    return data.unflatten(-1, (-1, num_bytes))


def _q4_0(data: Tensor) -> Int4Groups:
    groups = _blocks(data, 18)
    scale = _fp16(groups[..., :2])
    return _four_bits(_halves(groups[..., 2:]), scale, -8 * scale)


def _q4_1(data: Tensor) -> Int4Groups:
    groups = _blocks(data, 20)
    return _four_bits(_halves(groups[..., 4:]), _fp16(groups[..., :2]), _fp16(groups[..., 2:4]))


def _q8_0(data: Tensor) -> Int4Groups:
    groups = _blocks(data, 34)
    return _eight_bits(groups[..., 2:].contiguous().view(torch.int8), _fp16(groups[..., :2]))


def _fifth_bits(data: Tensor) -> Tensor:
    """Return bit after bit of 4 bytes, as 0 or 16, for the 32 columns of a group."""
    bits = (data[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q5_0(data: Tensor) -> Int4Groups:
    groups = _blocks(data, 22)
    integers = _halves(groups[..., 6:]) | _fifth_bits(groups[..., 2:6])
    return _eight_bits(integers.to(torch.int8) - 16, _fp16(groups[..., :2]))


def _q5_1(data: Tensor) -> Int4Groups:
    groups = _blocks(data, 24)
    integers = _halves(groups[..., 8:]) | _fifth_bits(groups[..., 4:8])
    scale, minimum = _fp16(groups[..., :2]), _fp16(groups[..., 2:4])
    return _eight_bits(integers.to(torch.int8) - 16, scale, minimum + 16 * scale)


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of the groups of K-quant blocks, fp32 `[.., num_groups, 1]`.

    Twelve bytes have eight scales and eight minima of 6 bits. Four scales and four minima are whole
    in the first eight bytes; the lower four bits of the others are in the last four, and their
    upper two are the upper two of the first eight.
    """
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=-1)
    scale = _fp16(blocks[..., :2]) * scales.float()
    minimum = -_fp16(blocks[..., 2:4]) * minima.float()
    return scale.flatten(-2)[..., None], minimum.flatten(-2)[..., None]


def _nibbles_of_k(data: Tensor) -> Tensor:
    """Return integers `[.., 8, 32]` of a block's 128 bytes: 32 bytes have a group in their low
    halves, and the next group in their high ones."""
    pairs = data.unflatten(-1, (4, GROUP))
    return torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)


def _q4_k(data: Tensor) -> Int4Groups:
    blocks = _blocks(data, 144)
    return _four_bits(_nibbles_of_k(blocks[..., 16:]).flatten(1, 2), *_scales_of_k(blocks))


def _q5_k(data: Tensor) -> Int4Groups:
    blocks = _blocks(data, 176)
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[..., None, 16:48] >> groups) & 1) << 4  # bit g of byte c: column c of group g
    integers = (_nibbles_of_k(blocks[..., 48:]) | fifth).flatten(1, 2)
    scale, minimum = _scales_of_k(blocks)
    return _eight_bits(integers.to(torch.int8) - 16, scale, minimum + 16 * scale)


EXACT: dict[str, Callable[[Tensor], Int4Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q8_0": _q8_0,
}
"""Types whose numbers the words have. Matrices of all others are rounded."""
