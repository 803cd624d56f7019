"""Whole plans of scripted cases: who, which tokens, which blocks, who had to go, what moves.

`a[4:5]@0,2 | -b out 1>0` reads: a computes token 4, its table is [0, 2]; b is preempted, and device
block 1 goes to host block 0 (see `plan_line`).
"""

from __future__ import annotations

import pytest

from milestone_llm.core.plan import Preemption, ScheduledRequest, StepPlan
from milestone_llm.core.request import RequestStatus
from paged_helpers import PagedDevice, add_all, make_requests, make_scheduler, run_to_end, step

FIVE_EACH = [("a", 4, 5), ("b", 3, 5)]

GOLDEN = {
    "tables grow when a block is full": (
        {"num_blocks": 8},
        [("a", 3, 3), ("b", 4, 2)],
        [
            "a[0:3]@0 b[0:4]@1 | +a +b",
            "a[3:4]@0 b[4:5]@1,2",
            "a[4:5]@0,3",
        ],
    ),
    "recompute: b goes, and starts again with the token it had": (
        {"num_blocks": 3},
        FIVE_EACH,
        [
            "a[0:4]@0 b[0:3]@1 | +a +b",
            "a[4:5]@0,2 b[3:4]@1",
            "a[5:6]@0,2 | -b",
            "a[6:7]@0,2",
            "a[7:8]@0,2",
            "b[0:5]@1,2 | ^b",
            "b[5:6]@1,2",
            "b[6:7]@1,2",
        ],
    ),
    "swap: b goes to the host and continues where it was": (
        {"num_blocks": 3, "preemption": "swap"},
        FIVE_EACH,
        [
            "a[0:4]@0 b[0:3]@1 | +a +b",
            "a[4:5]@0,2 b[3:4]@1",
            "a[5:6]@0,2 | -b out 1>0",
            "a[6:7]@0,2",
            "a[7:8]@0,2",
            "b[4:5]@1,2 | ^b in 0>1",
            "b[5:6]@1,2",
            "b[6:7]@1,2",
        ],
    ),
    "swap space for one block: c is swapped, b with two is recomputed": (
        {"num_blocks": 4, "preemption": "swap", "swap_space_tokens": 4},
        [("a", 4, 6), ("b", 4, 6), ("c", 2, 3)],
        [
            "a[0:4]@0 b[0:4]@1 c[0:2]@2 | +a +b +c",
            "a[4:5]@0,3 b[4:5]@1,2 | -c out 2>0",
            "a[5:6]@0,3 b[5:6]@1,2",
            "a[6:7]@0,3 b[6:7]@1,2",
            "a[7:8]@0,3 b[7:8]@1,2",
            "a[8:9]@0,3,2 | -b",
            "b[0:9]@1,2,3 c[2:3]@0 | ^b ^c in 0>0",
            "c[3:4]@0",
        ],
    ),
    "three completions share a prompt; two copy its last block, the third writes in place": (
        {"num_blocks": 8},
        [("a", 6, 4, 3)],
        [
            "a[0:6]@0,1 | +a +a/1 +a/2",
            "a[6:7]@0,2 a/1[6:7]@0,3 a/2[6:7]@0,1 | copy 1>2 copy 1>3",
            "a[7:8]@0,2 a/1[7:8]@0,3 a/2[7:8]@0,1",
            "a[8:9]@0,2,4 a/1[8:9]@0,3,5 a/2[8:9]@0,1,6",
        ],
    ),
    "a prompt that fills its blocks needs no copy": (
        {"num_blocks": 8},
        [("a", 4, 3, 2)],
        [
            "a[0:4]@0 | +a +a/1",
            "a[4:5]@0,1 a/1[4:5]@0,2",
            "a[5:6]@0,1 a/1[5:6]@0,2",
        ],
    ),
    "a pool for one: completions go, last first, and come back one by one": (
        {"num_blocks": 3},
        [("a", 6, 4, 3)],
        [
            "a[0:6]@0,1 | +a +a/1 +a/2",
            "a[6:7]@0,2 a/1[6:7]@0,1 | -a/2 copy 1>2",
            "a[7:8]@0,2 a/1[7:8]@0,1",
            "a[8:9]@0,2,1 | -a/1",
            "a/1[0:9]@1,2,0 | ^a/1",
            "a/2[0:7]@0,2 | ^a/2",
            "a/2[7:8]@0,2",
            "a/2[8:9]@0,2,1",
        ],
    ),
    "a prompt waits until all its completions have a seat, and nobody passes it": (
        {"num_blocks": 8, "max_num_seqs": 3},
        [("a", 4, 3, 2), ("b", 2, 2, 2), ("c", 2, 2)],
        [
            "a[0:4]@0 | +a +a/1",
            "a[4:5]@0,1 a/1[4:5]@0,2",
            "a[5:6]@0,1 a/1[5:6]@0,2",
            "b[0:2]@3 c[0:2]@4 | +b +b/1 +c",
            "b[2:3]@5 b/1[2:3]@3 c[2:3]@4 | copy 3>5",
        ],
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_plans(case):
    fields, requests, lines = GOLDEN[case]
    scheduler = make_scheduler(**fields)
    add_all(scheduler, *(make_requests(*r[:3], n=(*r, 1)[3]) for r in requests))
    assert run_to_end(scheduler) == lines
    assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0


def test_a_plan_in_full():
    """What the lines above leave out: the objects, the reason and the counts."""
    scheduler = make_scheduler(3, preemption="swap")
    a, b = make_requests("a", 4, 5), make_requests("b", 3, 5)
    add_all(scheduler, a, b)
    device = PagedDevice(scheduler)
    for _ in range(2):
        step(scheduler, device)
    assert scheduler.schedule() == StepPlan(
        rows=[ScheduledRequest(a, start=5, num_new_tokens=1, blocks=[0, 2])],
        preempted=[Preemption(b, "no free block for b")],
        swap_outs=[(1, 0)],
        waiting_reasons={"b": "no free block for b"},
    )
    assert (b.status, b.num_computed_tokens, b.num_output_tokens) == (RequestStatus.SWAPPED, 4, 2)
    assert (scheduler.preempter.num_preemptions, b.num_preemptions) == (1, 1)
    assert scheduler.preempter.host.block_tables == {"b": [0]}
