"""Whole plans of scripted cases: who, which tokens, which memory, who had to go, what moves.

`a[4:5]@0,2 b[0:3]@1 | +b -c out 3>0` reads: a computes token 4, its table is [0, 2]; b is admitted;
c is preempted, and device block 3 goes to host block 0 (see `plan_line`). For M4, what is shared
and evicted comes last: `evict 3 share 0,1`. M2 has regions in place of tables.

Requests are (step of arrival, name, prompt, max_tokens, other fields). A prompt is written by
blocks of four tokens; a digit stands for so many tokens of one's own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helpers.schedulers import (
    M2,
    M3,
    M4,
    Life,
    assert_tokens,
    completions,
    prompt,
    request_of,
)
from milestone_llm.core.request import Request

Case = tuple[dict[str, Any], list[tuple[Any, ...]], list[str]]

M2_PLANS: dict[str, Case] = {
    "newcomers join at the next step, and a finished request's region is used in it": (
        {},
        [(0, "a", "4", 4), (0, "b", "2", 2), (2, "c", "3", 2)],
        [
            "a[0:4]@0 b[0:2]@1 | +a +b",
            "a[4:5]@0 b[2:3]@1",
            "a[5:6]@0 c[0:3]@1 | +c",
            "a[6:7]@0 c[3:4]@1",
        ],
    ),
    "a's decode leaves 7 of 8 tokens: too few for b, enough for c, which waits, too": (
        {"max_num_batched_tokens": 8},
        [(0, "a", "3", 3), (0, "b", "8", 1), (0, "c", "2", 1)],
        [
            "a[0:3]@0 | +a",
            "a[3:4]@0",
            "a[4:5]@0",
            "b[0:8]@0 | +b",
            "c[0:2]@0 | +c",
        ],
    ),
    "running requests come first: of a budget of 6, 3 tokens are left, just what d needs": (
        {"max_num_seqs": 5, "max_num_batched_tokens": 6},
        [(0, name, "2", 3) for name in "abc"] + [(1, "d", "3", 1), (1, "e", "1", 1)],
        [
            "a[0:2]@0 b[0:2]@1 c[0:2]@2 | +a +b +c",
            "a[2:3]@0 b[2:3]@1 c[2:3]@2 d[0:3]@3 | +d",
            "a[3:4]@0 b[3:4]@1 c[3:4]@2 e[0:1]@3 | +e",
        ],
    ),
    "priority decides who is next, and takes no place from the running": (
        {"max_num_seqs": 1, "policy": "priority"},
        [
            (0, "low", "2", 2, {"priority": 9}),
            (0, "mid", "2", 2, {"priority": 5}),
            (1, "urgent", "2", 1, {"priority": -1}),
            (1, "same", "2", 1, {"priority": 5}),
        ],
        [
            "mid[0:2]@0 | +mid",
            "mid[2:3]@0",
            "urgent[0:2]@0 | +urgent",
            "same[0:2]@0 | +same",
            "low[0:2]@0 | +low",
            "low[2:3]@0",
        ],
    ),
    "first come, first served ignores it": (
        {"max_num_seqs": 1},
        [(0, "a", "2", 1, {"priority": 9}), (0, "b", "2", 1)],
        ["a[0:2]@0 | +a", "b[0:2]@0 | +b"],
    ),
    "an urgent prompt that does not fit is not overtaken either": (
        {"max_num_batched_tokens": 8, "policy": "priority"},
        [(0, "a", "4", 2), (1, "urgent", "8", 1, {"priority": -1}), (1, "b", "1", 1)],
        ["a[0:4]@0 | +a", "a[4:5]@0", "urgent[0:8]@0 | +urgent", "b[0:1]@0 | +b"],
    ),
}

FIVE_EACH = [(0, "a", "4", 5), (0, "b", "3", 5)]

M3_PLANS: dict[str, Case] = {
    "tables grow when a block is full": (
        {},
        [(0, "a", "3", 3), (0, "b", "4", 2)],
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
        [(0, "a", "4", 6), (0, "b", "4", 6), (0, "c", "2", 3)],
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
        {},
        [(0, "a", "6", 4, {"n": 3})],
        [
            "a[0:6]@0,1 | +a +a/1 +a/2",
            "a[6:7]@0,2 a/1[6:7]@0,3 a/2[6:7]@0,1 | copy 1>2 copy 1>3",
            "a[7:8]@0,2 a/1[7:8]@0,3 a/2[7:8]@0,1",
            "a[8:9]@0,2,4 a/1[8:9]@0,3,5 a/2[8:9]@0,1,6",
        ],
    ),
    "a prompt that fills its blocks needs no copy": (
        {},
        [(0, "a", "4", 3, {"n": 2})],
        [
            "a[0:4]@0 | +a +a/1",
            "a[4:5]@0,1 a/1[4:5]@0,2",
            "a[5:6]@0,1 a/1[5:6]@0,2",
        ],
    ),
    "a pool for one: completions go, last first, and come back one by one": (
        {"num_blocks": 3},
        [(0, "a", "6", 4, {"n": 3})],
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
        {"max_num_seqs": 3},
        [(0, "a", "4", 3, {"n": 2}), (0, "b", "2", 2, {"n": 2}), (0, "c", "2", 2)],
        [
            "a[0:4]@0 | +a +a/1",
            "a[4:5]@0,1 a/1[4:5]@0,2",
            "a[5:6]@0,1 a/1[5:6]@0,2",
            "b[0:2]@3 c[0:2]@4 | +b +b/1 +c",
            "b[2:3]@5 b/1[2:3]@3 c[2:3]@4 | copy 3>5",
        ],
    ),
    "one that needs a block goes itself, if it is the junior": (
        {"num_blocks": 2},
        [(0, "a", "2", 3), (0, "b", "4", 2)],
        [
            "a[0:2]@0 b[0:4]@1 | +a +b",
            "a[2:3]@0 | -b",
            "a[3:4]@0",
            "b[0:5]@1,0 | ^b",
        ],
    ),
    "no more go than necessary": (
        {"num_blocks": 4},
        [(0, "a", "4", 2)] + [(0, name, "2", 2) for name in "bcd"],
        [
            "a[0:4]@0 b[0:2]@1 c[0:2]@2 d[0:2]@3 | +a +b +c +d",
            "a[4:5]@0,3 b[2:3]@1 c[2:3]@2 | -d",
            "d[0:3]@3 | ^d",
        ],
    ),
    "as many completions go as it takes until a shared block is free": (
        {"num_blocks": 2},
        [(0, "a", "6", 2, {"n": 3})],
        [
            "a[0:6]@0,1 | +a +a/1 +a/2",
            "a[6:7]@0,1 | -a/2 -a/1",
            "a/1[0:7]@1,0 | ^a/1",
            "a/2[0:7]@0,1 | ^a/2",
        ],
    ),
    "two that go in one step wait in the order of their arrival": (
        {"num_blocks": 8, "block_size": 1},
        [(0, name, "2", 3) for name in "abcd"],
        [
            "a[0:2]@0,1 b[0:2]@2,3 c[0:2]@4,5 d[0:2]@6,7 | +a +b +c +d",
            "a[2:3]@0,1,7 b[2:3]@2,3,6 | -d -c",
            "a[3:4]@0,1,7,5 b[3:4]@2,3,6,4",
            "c[0:3]@5,7,1 d[0:3]@0,4,6 | ^c ^d",
            "c[3:4]@5,7,1,3 d[3:4]@0,4,6,2",
        ],
    ),
    "by priority, then by arrival: a goes for b and c, and c for b": (
        {"num_blocks": 4, "policy": "priority"},
        [
            (0, "a", "3", 7, {"priority": 2}),
            (1, "b", "3", 7, {"priority": 1}),
            (2, "c", "3", 7, {"priority": 1}),
        ],
        [
            "a[0:3]@0 | +a",
            "a[3:4]@0 b[0:3]@1 | +b",
            "b[3:4]@1 a[4:5]@0,2 c[0:3]@3 | +c",
            "b[4:5]@1,2 c[3:4]@3 | -a",
            "b[5:6]@1,2 c[4:5]@3,0",
            "b[6:7]@1,2 c[5:6]@3,0",
            "b[7:8]@1,2 c[6:7]@3,0",
            "b[8:9]@1,2,0 | -c",
            "c[0:8]@3,0 a[0:6]@2,1 | ^c ^a",
            "c[8:9]@3,0,1 | -a",
            "a[0:7]@2,1 | ^a",
            "a[7:8]@2,1",
            "a[8:9]@2,1,0",
        ],
    ),
    "nobody is admitted in a step that preempted: d, the next, would fit": (
        {"num_blocks": 4, "policy": "priority"},
        [(0, "a", "4", 2), (0, "b", "9", 2, {"priority": 2}), (1, "d", "1", 1, {"priority": 1})],
        [
            "a[0:4]@0 b[0:9]@1,2,3 | +a +b",
            "a[4:5]@0,3 | -b",
            "d[0:1]@2 b[0:10]@1,3,0 | +d ^b",
        ],
    ),
    "nobody overtakes a preempted request that does not fit yet": (
        {"num_blocks": 4},
        [(0, "a", "4", 4), (0, "b", "9", 2), (0, "d", "1", 1)],
        [
            "a[0:4]@0 b[0:9]@1,2,3 | +a +b",
            "a[4:5]@0,3 | -b",
            "a[5:6]@0,3",
            "a[6:7]@0,3",
            "b[0:10]@2,1,3 d[0:1]@0 | +d ^b",
        ],
    ),
    "a and b take 2 of 6 tokens of a step: there is none with room for 5 of d again": (
        {"num_blocks": 16, "block_size": 1, "max_model_len": 6, "max_num_batched_tokens": 6},
        [(0, "a", "1", 5), (0, "b", "1", 5), (0, "c", "2", 4), (0, "d", "2", 4)],
        [
            "a[0:1]@0 b[0:1]@1 c[0:2]@2,3 d[0:2]@4,5 | +a +b +c +d",
            "a[1:2]@0,6 b[1:2]@1,7 c[2:3]@2,3,8 d[2:3]@4,5,9",
            "a[2:3]@0,6,10 b[2:3]@1,7,11 c[3:4]@2,3,8,12 d[3:4]@4,5,9,13",
            "a[3:4]@0,6,10,14 b[3:4]@1,7,11,15 c[4:5]@2,3,8,12,13 | -d",
            "a[4:5]@0,6,10,14,9 b[4:5]@1,7,11,15,5",
            "d[0:5]@4,13,12,8,3 | ^d",
        ],
    ),
    "except the one token that is new to it, if it was swapped": (
        {
            "num_blocks": 16,
            "block_size": 1,
            "max_model_len": 6,
            "max_num_batched_tokens": 6,
            "preemption": "swap",
        },
        [(0, "a", "1", 5), (0, "b", "1", 5), (0, "c", "2", 4), (0, "d", "2", 4)],
        [
            "a[0:1]@0 b[0:1]@1 c[0:2]@2,3 d[0:2]@4,5 | +a +b +c +d",
            "a[1:2]@0,6 b[1:2]@1,7 c[2:3]@2,3,8 d[2:3]@4,5,9",
            "a[2:3]@0,6,10 b[2:3]@1,7,11 c[3:4]@2,3,8,12 d[3:4]@4,5,9,13",
            "a[3:4]@0,6,10,14 b[3:4]@1,7,11,15 c[4:5]@2,3,8,12,13 | -d "
            "out 4>0 out 5>1 out 9>2 out 13>3",
            "a[4:5]@0,6,10,14,9 b[4:5]@1,7,11,15,5 d[4:5]@4,13,12,8,3 | ^d "
            "in 0>4 in 1>13 in 2>12 in 3>8",
        ],
    ),
}

M4_PLANS: dict[str, Case] = {
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
            "c[8:11]@0,1,3 | +c share 0,1",
        ],
    ),
    "eviction: unused blocks first, then a's last before a's first": (
        {"num_blocks": 5},
        [(0, "a", "AB1", 1), (1, "b", "XYZ1", 1), (2, "c", "AB2", 1)],
        [
            "a[0:9]@0,1,2 | +a",
            "b[0:13]@2,3,4,1 | +b evict 1",
            "c[4:10]@0,1,4 | +c share 0 evict 4",
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
    "b would have to copy its last block, and there is no room for that": (
        {"num_blocks": 3},
        [(0, "a", "AB", 3), (1, "b", "AB", 1)],
        [
            "a[0:8]@0,1 | +a",
            "a[8:9]@0,1,2",
            "a[9:10]@0,1,2",
            "b[7:8]@0,1 | +b share 0,1",
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
            "a[4:5]@0,3",
        ],
    ),
    "a half-computed prompt is swapped: only the blocks with something in them move": (
        {"num_blocks": 4, "max_num_batched_tokens": 2, "preemption": "swap"},
        [(0, "a", "2", 8), (0, "b", "BCD", 1)],
        [
            "a[0:2]@0 | +a",
            "a[2:3]@0 b[0:1]@1,2,3 | +b",
            "a[3:4]@0 b[1:2]@1,2,3",
            "a[4:5]@0,1 | -b out 1>0",
            "a[5:6]@0,1",
            "a[6:7]@0,1",
            "a[7:8]@0,1",
            "a[8:9]@0,1,2",
            "b[2:4]@2,3,1 | ^b in 0>2 evict 1",
            "b[4:6]@2,3,1",
            "b[6:8]@2,3,1",
            "b[8:10]@2,3,1",
            "b[10:12]@2,3,1",
        ],
    ),
    "a hit leaves more of a step to others, also without chunks: b has 21 tokens, c 2 of 42": (
        {
            "num_blocks": 24,
            "max_model_len": 48,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 48,
        },
        [(0, "a", "ABCDEFGHIJ1", 1), (1, "b", "VWXYZ1", 1), (1, "c", "ABCDEFGHIJ2", 1)],
        [
            "a[0:41]@0,1,2,3,4,5,6,7,8,9,10 | +a",
            "b[0:21]@10,11,12,13,14,15 c[40:42]@0,1,2,3,4,5,6,7,8,9,16 "
            "| +b +c share 0,1,2,3,4,5,6,7,8,9",
        ],
    ),
}


def play(milestone: str, case: Case) -> list[str]:
    """The plans of a case, with what the trace tells of evictions and sharing."""
    fields, arrivals, _ = case
    life, lines, leaders = Life(milestone=milestone, **fields), [], []
    for step in itertools.count():
        for _, *request in (arrival for arrival in arrivals if arrival[0] == step):
            leaders.append(scripted(*request))
            life.add(leaders[-1])
        if life.scheduler.has_unfinished_requests():
            lines.append(life.line() + events(life))
        elif step > max(arrival[0] for arrival in arrivals):
            break
    for leader in leaders:
        assert_tokens(completions(leader))
    assert life.scheduler.kv_usage().used == 0
    return lines


def scripted(
    name: str, text: str, max_tokens: int, fields: dict[str, Any] | None = None
) -> Request:
    """A request of a case."""
    blocks = text.rstrip("0123456789")
    token_ids = prompt(blocks, int(text[len(blocks) :] or 0), own=name)
    return request_of(name, token_ids, max_tokens, **(fields or {}))


def events(life: Life) -> str:
    """What was evicted and shared by hits in the last step."""
    told = [event for event in life.scheduler.drain_events() if event.type in ("share", "evict")]
    if not getattr(life.scheduler.config, "enable_prefix_caching", False):
        return ""
    return "".join(f" {event.type} {','.join(map(str, event.blocks))}" for event in told)


@pytest.mark.parametrize("case", M2_PLANS)
def test_regions(case):
    assert play(M2, M2_PLANS[case]) == M2_PLANS[case][2]


@pytest.mark.parametrize("case", M3_PLANS)
def test_blocks(case):
    assert play(M3, M3_PLANS[case]) == M3_PLANS[case][2]


@pytest.mark.parametrize("case", M3_PLANS)
def test_with_both_switches_off_m4_plans_what_m3_plans(case):
    fields, arrivals, lines = M3_PLANS[case]
    off = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    assert play(M4, ({**off, **fields}, arrivals, lines)) == lines


@pytest.mark.parametrize("case", M4_PLANS)
def test_chunks_and_hits(case):
    assert play(M4, M4_PLANS[case]) == M4_PLANS[case][2]
