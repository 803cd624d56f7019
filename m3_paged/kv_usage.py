"""Figures of paged KV memory, and checks that no block is lost. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from milestone_llm.core.kv import KVUsage
from milestone_llm.core.request import Request, RequestStatus

from .block_manager import BlockManager
from .preemption import Preempter


def paged_kv_usage(
    kv: BlockManager, running: Sequence[Request], watermark: int, cached: int = 0
) -> KVUsage:
    """Return how full KV memory is, in blocks; `cached` free ones can still be found by content."""
    num_used = kv.pool.num_used
    return KVUsage(
        unit="block",
        total=kv.pool.num_blocks,
        used=num_used,
        watermark=watermark,
        reserved_tokens=num_used * kv.block_size,
        stored_tokens=stored_tokens(kv, running),
        cached=cached,
    )


def stored_tokens(kv: BlockManager, running: Sequence[Request]) -> int:
    """Return the tokens stored in used blocks; the tokens of a shared block count once."""
    full: set[int] = set()
    partly: dict[int, int] = {}
    for request in running:
        block_table = kv.block_tables[request.request_id]
        num_full, rest = divmod(request.num_computed_tokens, kv.block_size)
        full.update(block_table[:num_full])
        if rest:
            block = block_table[num_full]
            partly[block] = max(rest, partly.get(block, 0))
    in_partly = sum(tokens for block, tokens in partly.items() if block not in full)
    return kv.block_size * len(full) + in_partly


def kv_stats(
    kv: BlockManager, preempter: Preempter, running: Sequence[Request]
) -> dict[str, object]:
    """Return preemptions, copies, and places that are reserved but empty."""
    return {
        "preemptions": preempter.num_preemptions,
        "copied_blocks": kv.num_copies,
        "kv": {
            "wasted_tokens": kv.pool.num_used * kv.block_size - stored_tokens(kv, running),
            "wasted_tokens_by_request": {
                request.request_id: kv.block_size * len(kv.block_tables[request.request_id])
                - request.num_computed_tokens
                for request in running
            },
        },
    }


def check_tables(
    kv: BlockManager, preempter: Preempter, running: Iterable[Request], waiting: Iterable[Request]
) -> None:
    """Assert that no block is lost and that tables belong to running or swapped requests."""
    kv.check_invariants()
    preempter.host.check_invariants()
    names = {request.request_id for request in running}
    assert names == set(kv.block_tables), "block tables belong to the running requests"
    swapped = {r.request_id for r in waiting if r.status is RequestStatus.SWAPPED}
    assert swapped == set(preempter.host.block_tables), "host blocks belong to swapped requests"
