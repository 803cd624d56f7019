"""Whole plans of scripted cases: who, which tokens, which blocks, what is shared and evicted.

`c[8:9]@0,1,3 | +c evict 3 share 0,1` reads: c computes token 8, its table is [0, 1, 3]; it is
admitted, shares blocks 0 and 1, and block 3 loses its content to it (see `plan_line`). Requests
are (step of arrival, name, prompt, max_tokens); prompts are written by blocks of four tokens, and
a digit stands for so many tokens of one's own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from milestone_llm.core.plan import ScheduledRequest, StepPlan
from prefix_helpers import Life, assert_tokens, prompt, request_of

GOLDEN: dict[str, tuple[dict[str, Any], list[tuple[int, str, str, int]], list[str]]] = {
    "a budget of 8: decode rows, then chunks in order, then newcomers": (
        {"num_blocks": 16, "max_num_batched_tokens": 8},
        [(0, "a", "2", 6), (1, "b", "BC2", 2), (1, "c", "D1", 1), (2, "d", "1", 2)],
        [
            "a[0:2]@0 | +a",
            "a[2:3]@0 b[0:7]@1,2,3 | +b",
            "a[3:4]@0 b[7:10]@1,2,3 c[0:4]@4,5 | +c",
            "a[4:5]@0,6 b[10:11]@1,2,3 c[4:5]@4,5 d[0:1]@7 | +d",
            "a[5:6]@0,6 d[1:2]@7",
            "a[6:7]@0,6",
        ],
    ),
    "chunks of at most 3: two prompts share a budget of 8, the third gets the rest": (
        {"num_blocks": 16, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 3},
        [(0, "a", "5", 1), (0, "b", "7", 1), (0, "c", "4", 1)],
        [
            "a[0:3]@0,1 b[0:3]@2,3 c[0:2]@4 | +a +b +c",
            "a[3:5]@0,1 b[3:6]@2,3 c[2:4]@4",
            "b[6:7]@2,3",
        ],
    ),
    "a hit on blocks in use, and one on blocks that are free": (
        {"num_blocks": 8},
        [(0, "a", "AB1", 2), (1, "b", "AB2", 1), (3, "c", "AB3", 1)],
        [
            "a[0:9]@0,1,2 | +a",
            "a[9:10]@0,1,2 b[8:10]@0,1,3 | +b share 0,1",
            "c[8:11]@0,1,4 | +c share 0,1",
        ],
    ),
    "eviction: unused blocks first, then a's last before a's first": (
        {"num_blocks": 5},
        [(0, "a", "AB1", 1), (1, "b", "XYZ1", 1), (2, "c", "AB2", 1)],
        [
            "a[0:9]@0,1,2 | +a",
            "b[0:13]@3,4,2,1 | +b evict 1",
            "c[4:10]@0,1,2 | +c share 0 evict 2",
        ],
    ),
    "a wholly cached prompt: one token in place, and for its twin one in a copy": (
        {"num_blocks": 8},
        [(0, "a", "AB", 1), (1, "b", "AB", 2), (1, "c", "AB", 2)],
        [
            "a[0:8]@0,1 | +a",
            "b[7:8]@0,1 c[7:8]@0,2 | +b +c copy 1>2 share 0,1 share 0,1",
            "b[8:9]@0,1,3 c[8:9]@0,2,4",
        ],
    ),
    "equal prompts in one step: the block that is only just being written is not copied": (
        {"num_blocks": 8},
        [(0, "a", "AB", 2), (0, "b", "AB", 2)],
        [
            "a[0:8]@0,1 b[4:8]@0,2 | +a +b share 0",
            "a[8:9]@0,1,3 b[8:9]@0,2,4",
        ],
    ),
    "a preempted request finds its own first block; its second went to a": (
        {"num_blocks": 4},
        [(0, "a", "A", 6), (0, "b", "BC", 3)],
        [
            "a[0:4]@0 b[0:8]@1,2 | +a +b",
            "a[4:5]@0,3 | -b",
            "a[5:6]@0,3",
            "a[6:7]@0,3",
            "a[7:8]@0,3",
            "a[8:9]@0,3,2 evict 2",
            "b[4:9]@1,2,3 | ^b share 1 evict 3",
            "b[9:10]@1,2,3",
        ],
    ),
    "prefill_first: a waits for all chunks of b": (
        {"num_blocks": 8, "max_num_batched_tokens": 4, "prefill_policy": "prefill_first"},
        [(0, "a", "2", 4), (2, "b", "BC2", 2)],
        [
            "a[0:2]@0 | +a",
            "a[2:3]@0",
            "b[0:4]@1,2,3 | +b",
            "b[4:8]@1,2,3",
            "b[8:10]@1,2,3",
            "a[3:4]@0 b[10:11]@1,2,3",
            "a[4:5]@0,4",
        ],
    ),
    "a half-computed prompt is swapped: only the blocks with something in them move": (
        {"num_blocks": 4, "max_num_batched_tokens": 2, "preemption": "swap"},
        [(0, "a", "2", 8), (0, "b", "BCD", 1)],
        [
            "a[0:2]@0 | +a",
            "a[2:3]@0 b[0:1]@1,2,3 | +b",
            "a[3:4]@0 b[1:2]@1,2,3",
            "a[4:5]@0,3 | -b out 1>0",
            "a[5:6]@0,3",
            "a[6:7]@0,3",
            "a[7:8]@0,3",
            "a[8:9]@0,3,2",
            "b[2:4]@1,2,3 | ^b in 0>1 evict 3",
            "b[4:6]@1,2,3",
            "b[6:8]@1,2,3",
            "b[8:10]@1,2,3",
            "b[10:12]@1,2,3",
        ],
    ),
}


def scripted(case: str) -> list[str]:
    """The plans of a case, with what the trace tells of evictions and sharing."""
    fields, arrivals, _ = GOLDEN[case]
    life, lines, requests = Life(**fields), [], []
    last_arrival = max(step for step, *_ in arrivals)
    for step in itertools.count():
        for _, name, text, max_tokens in (arrival for arrival in arrivals if arrival[0] == step):
            blocks = text.rstrip("0123456789")
            token_ids = prompt(blocks, int(text[len(blocks) :] or 0), own=name)
            requests.append(request_of(name, token_ids, max_tokens))
            life.add(requests[-1])
        if life.scheduler.has_unfinished_requests():
            lines.append(life.line() + events(life))
        elif step > last_arrival:
            break
    assert_tokens(requests)
    assert life.kv.pool.num_used == 0
    return lines


def events(life: Life) -> str:
    """What was evicted and shared in the last step."""
    told = [event for event in life.scheduler.drain_events() if event.type in ("share", "evict")]
    return "".join(f" {event.type} {','.join(map(str, event.blocks))}" for event in told)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_plans(case):
    assert scripted(case) == GOLDEN[case][2]


def test_a_plan_in_full():
    """What the lines above leave out: the objects, and how much each row was saved."""
    life = Life(max_num_batched_tokens=6)
    a, b = request_of("a", prompt("AB"), 3), request_of("b", prompt("AB", 3), 1)
    life.add(a)
    life.plan()
    life.plan()
    life.add(b)
    assert life.scheduler.schedule() == StepPlan(
        rows=[
            ScheduledRequest(a, start=8, num_new_tokens=1, blocks=[0, 1, 2]),
            ScheduledRequest(b, start=8, num_new_tokens=3, blocks=[0, 1, 3], num_cached_tokens=8),
        ],
        admitted=[b],
    )
    assert (a.num_computed_tokens, b.num_computed_tokens) == (8, 8)
    assert life.kv.pool.ref_counts[:4] == [2, 2, 1, 1]
