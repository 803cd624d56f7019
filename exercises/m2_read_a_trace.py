"""M2: read latencies off a trace.

A trace has one record a step. From it you can tell what every user saw: the time to the first token
(TTFT), and the longest time between two tokens of a request (the largest inter-token latency, ITL).
An average hides both: a user whose text stopped for a second does not notice the mean.

A record is a dict, one line of a file that `trace="steps.jsonl"` writes. You need:

    record["start_s"]        when the step began, seconds since the trace began
    record["schedule_ms"], record["execute_ms"], record["update_ms"]
                             its parts, in ms; when they are over, its tokens are there
    record["arrived"]        ids of the requests that came since the step before;
                             take the begin of this step for their arrival
    record["batch"]          its rows; row["request_id"], and row["sampled_token"], which is None
                             if the row gave no token

The test makes traces of M1 and of M2 with the same requests, on a clock of its own. It checks your
figures, and prints those of M2 next to those of M1. One of the two gets worse. Which, and why? (The
chapter on M4 is about it.)

    python -m pytest tests/exercises/test_m2_read_a_trace.py
"""

from __future__ import annotations

from typing import Any


def latencies(records: list[dict[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """Return the TTFT and the longest ITL of each request that got a token, both in ms.

    The ITL is None where a request got one token only.

    Hint: walk through the records once. Note when each request arrived, and for each request the
    times at which it got a token. Then look at pairs of neighbours (`itertools.pairwise`).
    """
    raise NotImplementedError
