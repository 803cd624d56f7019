"""Records of steps made by hand, for tests of code that prints, draws and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milestone_llm.core.kv import KVUsage
from milestone_llm.trace.records import BatchRow, StepRecord

LISTS = ("waiting", "running", "swapped", "arrived", "admitted", "resumed", "preempted", "finished")


def row(
    name: str, phase: str = "decode", start: int = 0, num_new_tokens: int = 1, **fields: Any
) -> BatchRow:
    values = {"num_cached_tokens": 0, "sampled_token": None, "blocks": [], **fields}
    return BatchRow(name, phase, start, num_new_tokens, **values)


def step(number: int, batch: Sequence[BatchRow] = (), **fields: Any) -> StepRecord:
    """Return a step with these rows and fields, in which nothing else happens."""
    values: dict[str, Any] = {
        "milestone": "m1_single",
        "schedule_ms": 0.1,
        "execute_ms": 8.04,
        "update_ms": 0.2,
        "start_s": 0.0,
        "kv": KVUsage("token", 0, 147, 147, 147, 74),
        "events": [],
        "waiting_reasons": {},
        **{name: [] for name in LISTS},
    }
    for phase in ("prefill", "decode", "padding"):
        values[f"num_{phase}_tokens"] = sum(r.num_new_tokens for r in batch if r.phase == phase)
    return StepRecord(step=number, batch=[*batch], **{**values, **fields})
