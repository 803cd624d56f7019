from __future__ import annotations

from itertools import pairwise
from typing import Any


def gaps(records: list[dict[str, Any]]) -> tuple[float, float]:
    inside, spans = 0.0, []
    for record in records:
        device = record["device"]
        start = record["start_s"] * 1e6 + device["start_us"]
        spans.append((start, start + device["us"]))
        inside += device["us"] - device["busy_us"]
    return inside, sum(max(0.0, after[0] - before[1]) for before, after in pairwise(spans))
