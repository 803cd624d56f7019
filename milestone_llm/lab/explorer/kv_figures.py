"""KV memory over a whole run, from a trace: how full it was, and how much was wasted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milestone_llm.trace.records import StepRecord


def kv_figures(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return figures of a run of m2_batching or later, by name.

    Means are over all steps after which a request still runs. `total` and `peak_used` count regions
    or blocks. Wasted are slots of reserved blocks that have no token.
    """
    busy = [record for record in records if record.running]
    reserved = sum(record.kv.reserved_tokens for record in busy)
    stored = sum(record.kv.stored_tokens for record in busy)
    events = [event for record in records for event in record.events]
    again = [row for each in records for row in each.batch if row.request_id in each.resumed]
    return {
        "total": records[0].kv.total,
        "peak_used": max(record.kv.used for record in records),
        "max_concurrent": max(len(record.batch) for record in records),
        "reserved_tokens": reserved / max(1, len(busy)),
        "stored_tokens": stored / max(1, len(busy)),
        "waste_share": 1 - stored / reserved if reserved else 0.0,
        "waste_per_request": (reserved - stored) / max(1, sum(len(each.running) for each in busy)),
        "num_preemptions": sum(len(record.preempted) for record in records),
        "num_resumptions": sum(len(record.resumed) for record in records),
        # The last token is new: it would be computed without the preemption, too.
        "num_recomputed_tokens": sum(row.num_new_tokens - 1 for row in again),
        "num_swapped_blocks": sum(len(e.blocks) for e in events if e.type == "swap_out"),
        "num_copies": sum(event.type == "copy_on_write" for event in events),
    }
