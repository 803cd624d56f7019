"""KV memory over a whole run, from a trace: how full it was, and how much was wasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milestone_llm.lab.trace.records import StepRecord


@dataclass(frozen=True)
class KVFigures:
    """KV memory over a run. Means are over all steps after which a request still runs."""

    unit: str
    total: int
    peak_used: int
    """Most units in use after a step."""
    max_concurrent: int
    """Most requests that one step computed."""
    reserved_tokens: float
    """Tokens that the units in use could hold, mean."""
    stored_tokens: float
    """Tokens that they did hold, mean."""
    waste_per_request: float
    """Reserved places without a token, mean over steps and running requests."""
    num_preemptions: int
    num_resumptions: int
    num_recomputed_tokens: int
    """Tokens whose KV was dropped by a preemption and computed again."""
    num_swapped_blocks: int
    """Blocks that moved to host memory."""
    num_copies: int
    """Blocks copied because a sharer wrote into them."""

    @property
    def waste_share(self) -> float:
        """Share of the reserved places that held no token, 0..1."""
        if not self.reserved_tokens:
            return 0.0
        return 1 - self.stored_tokens / self.reserved_tokens

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> KVFigures:
        """The figures of a trace of m2_batching or later.

        Raises:
            ValueError: the trace has no steps.
        """
        if not records:
            raise ValueError("the trace has no steps")
        busy = [record for record in records if record.running]
        reserved = sum(record.kv.reserved_tokens for record in busy)
        stored = sum(record.kv.stored_tokens for record in busy)
        num_running = sum(len(record.running) for record in busy)
        events = [event for record in records for event in record.events]
        return cls(
            unit=records[0].kv.unit,
            total=records[0].kv.total,
            peak_used=max(record.kv.used for record in records),
            max_concurrent=max(len(record.batch) for record in records),
            reserved_tokens=reserved / max(1, len(busy)),
            stored_tokens=stored / max(1, len(busy)),
            waste_per_request=(reserved - stored) / max(1, num_running),
            num_preemptions=sum(len(record.preempted) for record in records),
            num_resumptions=sum(len(record.resumed) for record in records),
            num_recomputed_tokens=sum(
                row.num_new_tokens - 1  # the last is new: a resumed request would get it anyway
                for record in records
                for row in record.batch
                if row.request_id in record.resumed
            ),
            num_swapped_blocks=sum(
                len(event.blocks) for event in events if event.type == "swap_out"
            ),
            num_copies=sum(event.type == "copy_on_write" for event in events),
        )
