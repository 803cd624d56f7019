"""`hidden @ weight.T`, by the kernel that suits the weight and the number of rows.

A step of few rows is nothing but reading weights, and there ours are faster than the library:

    weight                     tokens   kernel
    of 8 bits, small           1..4     int8_linear: multiplied as it comes, no tensor cores
    of 8 bits                  1        int8_linear
    of 8 bits, in bf16         2..      hopper_int8 (on Hopper)
    of 8 bits                  2..      int8_linear: tensor cores
    small, of 16 bits          1..16    register_linear: all on its way at once (from Hopper on)
    small, in bf16             17..256  hopper_linear: on its way early (on Hopper)
    any                        1        skinny_linear: multiplied as it comes
    of 16 bits                 2..16    dot_linear: tensor cores, by shared memory
    any                        any      the library's

The first line that fits; but many rows of up to 1,024 elements have the kernel of two tokens from
one on. Each kernel adds up all tokens alike. So a token's products have the same bits alone and
beside guesses, where the number of tokens does not decide between two kernels; in eight bits it
decides between tiles, too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .backend import fits_copy_engine, runs_triton, supports_pdl
from .dot_linear import dot_linear
from .int8_linear import int8_linear, max_int8_tokens
from .int8_weight import Int8Weight, int8_linear_torch
from .register_linear import MAX_TOKENS, fits_registers, register_linear
from .silu_mul import silu_mul, silu_mul_torch
from .skinny_linear import skinny_linear
from .tiles import SHORT_ROW

MAX_HOPPER_TOKENS = 256
"""Up to which the library's products take longer than `hopper_linear`, measured on an H200."""


def linear(
    hidden: torch.Tensor,
    weight: torch.Tensor | Int8Weight,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    pdl: int = 0,
) -> torch.Tensor:
    """`hidden @ weight.T + bias`, accumulated in fp32.

    hidden: `[num_tokens, in_size]`, rows contiguous; weight: `[out_size, in_size]`, contiguous, or
    in eight bits; bias: `[out_size]` or None. Returns `[num_tokens, out_size]`.
    is_gated: the first half of the outputs is a gate: returns silu(gate) * up, half as many.
    pdl: start before the previous kernel ends, which must not be the one that wrote the weight.
    """
    num_tokens, has_kernels = len(hidden), runs_triton(hidden)
    if isinstance(weight, Int8Weight):
        if takes_hopper_int8(hidden, weight, is_gated):
            from .hopper_int8 import hopper_int8  # Gluon: NVIDIA's GPUs alone

            return hopper_int8(hidden, weight, bias, is_gated, pdl=bool(pdl))
        output = int8_linear(hidden, weight, bias, pdl=bool(pdl))
    elif takes_registers(num_tokens, weight):
        return register_linear(hidden, weight, bias, is_gated, pdl=pdl)
    elif takes_hopper(hidden, weight, is_gated):
        from .hopper_linear import hopper_linear

        return hopper_linear(hidden, weight, bias, is_gated, pdl=pdl)
    elif has_kernels and takes_dot(num_tokens, weight):
        output = dot_linear(hidden, weight, bias, pdl=pdl)
    elif has_kernels and num_tokens == 1:
        return skinny_linear(hidden, weight, bias, is_gated, pdl=pdl)
    else:
        output = F.linear(hidden, weight, bias)
    return silu_mul(output, pdl) if is_gated else output


def takes_registers(num_tokens: int, weight: torch.Tensor | Int8Weight) -> bool:
    """Whether the product of so many tokens goes to `register_linear`.

    It gains by what it asks for before it waits, so not without programmatic dependent launch.
    """
    if isinstance(weight, Int8Weight) or weight.element_size() != 2:
        return False
    if not supports_pdl(weight.device):
        return False
    return 1 <= num_tokens <= MAX_TOKENS and fits_registers(*weight.shape)


def takes_hopper(hidden: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> bool:
    """Whether the product goes to `hopper_linear`: larger weights the library reads as fast."""
    out_size, in_size = weight.shape
    if not MAX_TOKENS < len(hidden) <= MAX_HOPPER_TOKENS or not fits_registers(out_size, in_size):
        return False
    return fits_copy_engine(hidden, in_size, out_size // (1 + is_gated))


def takes_dot(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether the product goes to `dot_linear`: what was fastest on an H200 with Qwen3's shapes.

    Of many short rows the programs of `skinny_linear` are through with each too soon.
    """
    has_short_rows = weight.shape[1] <= SHORT_ROW and len(weight) >= 4096
    fewest = 1 if has_short_rows else 2
    return weight.element_size() == 2 and fewest <= num_tokens <= MAX_TOKENS


def takes_hopper_int8(hidden: torch.Tensor, weight: Int8Weight, is_gated: bool) -> bool:
    """Whether the product goes to `hopper_int8`, and not to a kernel for fewer tokens."""
    out_size, (num_tokens, in_size) = len(weight), hidden.shape
    has_rows = num_tokens > max_int8_tokens(out_size, in_size)
    return has_rows and fits_copy_engine(hidden, out_size // (1 + is_gated))


def linear_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor | Int8Weight,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    pdl: int = 0,
) -> torch.Tensor:
    """The specification of `linear`."""
    if isinstance(weight, Int8Weight):
        output = int8_linear_torch(hidden, weight, bias)
    else:
        output = F.linear(hidden, weight, bias)
    return silu_mul_torch(output) if is_gated else output
