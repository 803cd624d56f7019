"""What KV managers tell of their memory: how full it is, and what happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KVUsage:
    """How full the KV cache is after a step; all but tokens count `unit`s."""

    unit: str
    """`token` in M1, `region` (one request's, contiguous) in M2, `block` from M3 on."""
    total: int
    used: int
    watermark: int
    """Most that a step has had."""
    reserved_tokens: int
    """Tokens that the used units could hold."""
    stored_tokens: int
    """Tokens of unfinished requests that they do hold."""
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
    """Those of a `free` that are not free: other requests hold them still."""
