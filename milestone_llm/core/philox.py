"""Random numbers that need no state: Philox4x32-10, and the Gumbel noise made of it.

An ordinary generator is a state that every draw moves on. Philox is a function instead: number =
philox(counter, key). With its seed as key and (vocabulary id, output position) as counter, a
request draws the same noise in any batch, on a CPU or a GPU, and again when it was preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
"""Added to the key after each round: the golden ratio and sqrt(3) - 1, as 32-bit fractions."""


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, one number for each row and vocabulary id.

    Id v of a row with seed s at output position p takes lane v % 4 of
    philox(counter=(v // 4, p, 0, 0), key=(s's low 32 bits, s's high 32 bits)); the upper 23 bits x
    of that lane give u = (x + 0.5) / 2**23, never 0 or 1; the noise is -log(-log(u)). The noise is
    computed in fp64 and rounded to fp32. The last bits of a logarithm differ between libraries,
    between a loop and its tail, and so between places in a batch and devices. Rounding takes those
    bits away.

    Args:
        seeds: `[num_rows]` int64, the bits of unsigned 64-bit seeds (see `seeds_to_tensor`).
        positions: `[num_rows]` int64, index of the output token to be sampled, below 2**32.
        vocab_size: Noise is made for ids 0 .. vocab_size - 1.

    Returns:
        `[num_rows, vocab_size]` fp32, on the device of `seeds`, between -2.82 and 16.64.
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None, :]
    lanes = _lanes(seeds, positions, blocks).flatten(start_dim=1)
    return _gumbel(lanes[:, :vocab_size])


def gumbel_noise_at(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the columns `ids` of `gumbel_noise`, without making the others.

    `ids` is `[num_rows, num_ids]` int64, a selection of its own for each row. The result has the
    same shape.
    """
    lanes = _lanes(seeds, positions, ids // 4)
    return _gumbel(lanes.gather(-1, (ids % 4)[..., None]).squeeze(-1))


def philox4x32(
    counter: Sequence[Tensor], key: Sequence[Tensor], num_rounds: int = 10
) -> tuple[Tensor, ...]:
    """Compute Philox4x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC '11).

    Counter, key and result are int64 tensors with values in [0, 2**32), of shapes that broadcast.
    Ten rounds are what the paper recommends.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(num_rounds):
        # Products need 64 bits. An int64 wraps to the very same bits; only `>>` copies the sign
        # into the upper half, and the mask takes that away again.
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        c0 = ((product_1 >> 32) & _LOW_32) ^ c1 ^ k0
        c1 = product_1 & _LOW_32
        c2 = ((product_0 >> 32) & _LOW_32) ^ c3 ^ k1
        c3 = product_0 & _LOW_32
        k0 = (k0 + _WEYL[0]) & _LOW_32
        k1 = (k1 + _WEYL[1]) & _LOW_32
    return c0, c1, c2, c3


def seeds_to_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return seeds in [0, 2**64) as `[len(seeds)]` int64 with the same bits (two's complement)."""
    return torch.tensor(list(seeds), dtype=torch.uint64, device=device).view(torch.int64)


def _lanes(seeds: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """Return Philox outputs `[num_rows, num_blocks, 4]` for counters (block, position, 0, 0)."""
    zero = torch.zeros_like(blocks[:1, :1])
    key = (seeds[:, None] & _LOW_32, (seeds[:, None] >> 32) & _LOW_32)
    return torch.stack(philox4x32((blocks, positions[:, None], zero, zero), key), dim=-1)


def _gumbel(bits: Tensor) -> Tensor:
    uniform = ((bits >> 9).double() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_().float()
