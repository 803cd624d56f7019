"""The tile of a program: how much it computes at once. `gpu_tiles` chooses the tile for a GPU."""

from __future__ import annotations

from typing import NamedTuple


class DecodeTile(NamedTuple):
    """How Flash-Decoding walks a context."""

    tokens: int  # KV tokens that a program loads at once
    num_warps: int
    num_stages: int  # tiles in flight
    programs_per_sm: int


class PrefillTile(NamedTuple):
    """How a prefill program covers the score matrix."""

    rows: int  # query rows (tokens x heads of a group)
    tokens: int  # KV tokens
    num_warps: int
    num_stages: int


class LinearTile(NamedTuple):
    """The part of the weight that a program reads, if it multiplies in registers."""

    columns: int  # outputs
    depth: int  # inputs at a time
    num_warps: int
