"""KV memory as others see it: its manager, how full it is, what happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .request import Request

NULL_BLOCK = -1
"""Entry of a block table whose block has been given back: no layer of the group reads it again."""


class BlockTables(list[int]):
    """The block table of a request in the first group of layers, with those in further groups.

    Layers are in groups where they need the KV of a token for different times: see
    `m4_prefix_chunked.hybrid`. A request has one plain list elsewhere.
    """

    def __init__(self, first: Iterable[int], further: list[list[int]]) -> None:
        super().__init__(first)
        self.further = further


def tables_of(blocks: list[int]) -> list[list[int]]:
    """Return a block table in each group of layers: one where there is one group."""
    return [blocks, *blocks.further] if isinstance(blocks, BlockTables) else [blocks]


def copy_of(blocks: list[int]) -> list[int]:
    """Return a copy of a block table, in all groups of layers."""
    first, *further = (list(table) for table in tables_of(blocks))
    return BlockTables(first, further) if further else first


class KVCacheManager(Protocol):
    """The methods that every milestone's KV manager has, for the scheduler that it belongs to.

    How memory is given out differs from milestone to milestone. That is between a scheduler and its
    own manager: `can_allocate`, `allocate` and what else `schedule` needs.
    """

    events: list[KVEvent]
    """Changes of KV memory that have not been drained, in order."""

    @property
    def num_used(self) -> int:
        """Units of KV memory that requests own, in the unit of `usage`."""

    def blocks_of(self, request: Request) -> list[int]:
        """Return where a running request's KV is: what its row of a plan says as well."""

    def free(self, request: Request) -> None:
        """Take back a request's KV memory, if it has any. The request runs no more."""

    def reset(self) -> None:
        """Take back all KV memory, even if the bookkeeping is broken."""

    def usage(self, running: Sequence[Request], watermark: int) -> KVUsage:
        """Return how full KV memory is."""

    def stats(self, running: Sequence[Request]) -> dict[str, object]:
        """Return this milestone's figures for `LLMEngine.stats`."""

    def check(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """Assert that no KV memory is lost and that it belongs to the right requests."""


@dataclass(frozen=True)
class KVUsage:
    """How full the KV cache is after a step; all but tokens count `unit`s."""

    unit: str
    """`token` in M1, `region` (one request's, contiguous) in M2, `block` from M3 on."""
    total: int
    used: int
    watermark: int
    """Most units that a step has used."""
    reserved_tokens: int
    """Tokens that the used units could hold."""
    stored_tokens: int
    """Tokens of unfinished requests that the used units do hold."""
    cached: int = 0
    """Free blocks whose content the prefix cache can still use (from M4 on)."""

    @property
    def free(self) -> int:
        """Units that no request owns."""
        return self.total - self.used


@dataclass(frozen=True)
class KVEvent:
    """Something that happened to KV memory. `blocks` are region numbers in M2."""

    type: str
    """`alloc`, `free`, `share`, `copy_on_write`, `evict`, `swap_out` or `swap_in`."""
    request_id: str | None
    blocks: list[int]
    held: list[int] = field(default_factory=list)
    """Blocks of a `free` that are not free: other requests still hold them."""
