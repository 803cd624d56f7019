from __future__ import annotations

from itertools import pairwise
from typing import Any


def latencies(records: list[dict[str, Any]]) -> dict[str, tuple[float, float | None]]:
    arrival_ms: dict[str, float] = {}
    token_ms: dict[str, list[float]] = {}
    for record in records:
        start = record["start_s"] * 1e3
        end = start + record["schedule_ms"] + record["execute_ms"] + record["update_ms"]
        for name in record["arrived"]:
            arrival_ms[name] = start
        for row in record["batch"]:
            if row["sampled_token"] is not None:
                token_ms.setdefault(row["request_id"], []).append(end)
    return {
        name: (times[0] - arrival_ms[name], max((b - a for a, b in pairwise(times)), default=None))
        for name, times in token_ms.items()
    }
