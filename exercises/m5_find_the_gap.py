"""M5: find the gap.

A GPU that waits costs as much as one that works. Open docs/pages/m5.html, where two runs of an H200
are side by side: launched kernel by kernel, and with graphs and pipelined steps. Look at the lane
of the device in a step. Or see all steps at once, in https://ui.perfetto.dev:

    python -m milestone_llm.lab.explorer docs/traces/m5_h200_launched.jsonl.gz \
        docs/traces/m5_h200_graphs.jsonl.gz --labels launched,graphs -o runs/m5.json

There are two kinds of gap: between the kernels of one step, and between the last kernel of a step
and the first of the next. Which one do graphs close, and which one pipelined steps? Measure both. A
record is a dict, one line of the trace:

    record["start_s"]               when the step began on the host, seconds since the trace began
    record["device"]["start_us"]    when its first kernel began, microseconds after that
    record["device"]["us"]          from its first kernel to the end of its last one
    record["device"]["busy_us"]     the part of it in which a kernel ran

With pipelined steps, the host begins a step while the device still computes the one before.

    python -m pytest tests/exercises/test_m5_find_the_gap.py
"""

from __future__ import annotations

from typing import Any


def gaps(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Return how long the device waited inside steps, and between steps, in microseconds.

    Hint: the device's times of two steps can be compared when both count from the beginning of the
    trace. `itertools.pairwise` gives neighbours. A step may begin before the one before has ended;
    then there is no gap.
    """
    raise NotImplementedError
