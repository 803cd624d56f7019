"""What the cache saves: after another's end, in one step, in generation, after preemption."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.schedulers import Life, assert_tokens, completions, prompt, request_of
from milestone_llm.core.kv import KVEvent
from milestone_llm.core.request import RequestStatus


def first_row(life: Life, *args: Any, **fields: Any) -> tuple[int, int, list[int]]:
    """Start, end and blocks of the first row of a request that is then run to its end."""
    request = request_of(*args, **fields)
    life.add(request)
    (row,) = [row for row in life.plan().rows if row.request is request]
    assert row.num_cached_tokens == row.start == request.num_cached_tokens
    span = (row.start, row.end, list(row.blocks))
    life.run()
    assert_tokens(completions(request))
    return span


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_of_a_wholly_cached_prompt_exactly_one_token_is_computed(num_blocks):
    """Its logits are wanted. Nobody holds the last block, so it is written in place."""
    life = Life()
    token_ids = prompt("ABC"[:num_blocks])
    life.run(request_of("a", token_ids))
    start, end, blocks = first_row(life, "b", token_ids, 3)
    assert (start, end) == (4 * num_blocks - 1, 4 * num_blocks)
    assert blocks == list(range(num_blocks))
    assert life.kv.blocks.num_copies == 0


@pytest.mark.parametrize(
    ("num_own", "expected"),
    [
        (0, "a[0:8]@0,1 b[4:8]@0,2 c[4:8]@0,3 | +a +b +c"),  # the last block is computed anew
        (2, "a[0:10]@0,1,2 b[8:10]@0,1,3 c[8:10]@0,1,4 | +a +b +c"),
    ],
)
def test_equal_prompts_admitted_in_one_step_share(num_own, expected):
    life = Life(16)
    requests = [request_of(name, prompt("AB", num_own), 3, seed=ord(name)) for name in "abc"]
    assert life.run(*requests)[0] == expected
    assert life.kv.blocks.num_copies == 0


def test_a_prompt_shares_what_a_chunk_of_the_same_step_completes():
    """a has 10 tokens, of which this step computes 9: two blocks are complete."""
    life = Life(16, max_num_batched_tokens=12, long_prefill_token_threshold=9)
    a, b = request_of("a", prompt("AB", 2)), request_of("b", prompt("ABC", 2))
    assert life.run(a, b)[0] == "a[0:9]@0,1,2 b[8:11]@0,1,3,4 | +a +b"


def test_the_last_token_of_an_output_has_no_kv_and_completes_no_block():
    life = Life(16)
    a = request_of("a", prompt("A"), 4)  # the eighth token is sampled, and never computed
    life.run(a)
    assert first_row(life, "b", a.token_ids + prompt("X"))[0] == 4


def test_evicted_blocks_are_missed_last_block_first():
    """x takes one block that a left and never filled, then the last two that it did fill."""
    life = Life(4)
    life.run(request_of("a", prompt("ABC", 1)))
    life.scheduler.drain_events()
    life.run(request_of("x", prompt("XY", 1)))
    events = life.scheduler.drain_events()
    assert [event for event in events if event.type == "evict"] == [
        KVEvent("evict", None, [2]),
        KVEvent("evict", None, [1]),
    ]
    assert first_row(life, "b", prompt("ABC", 1))[0] == 4
    assert life.counts["evictions"] == 4, "b's own two took y's and x's"


def test_blocks_that_came_back_from_a_swap_can_be_found():
    """They are others than before; those are a's by then, and what they held is forgotten."""
    life = Life(4, preemption="swap")
    a, b = request_of("a", prompt("A"), 8), request_of("b", prompt("BC"), 3)
    life.add(a, b)
    life.run_to_preemption()
    life.run()
    assert_tokens([a, b])
    assert life.counts["evictions"] >= 2
    assert first_row(life, "c", prompt("BC", 1))[0] == 8


def test_a_running_request_without_a_row_survives_a_step_that_raised():
    """Under prefill_first, a has no row beside the chunks of b. Its KV is computed again."""
    life = Life(16, max_num_batched_tokens=4, prefill_policy="prefill_first")
    a, b = request_of("a", prompt("A"), 4), request_of("b", prompt("ABC"), 2)
    life.add(a)
    life.plan()
    life.add(b)
    life.fail()
    assert (a.status, b.finish_reason) == (RequestStatus.WAITING, "error")
    assert (a.num_output_tokens, a.num_computed_tokens) == (1, 0)
    plan = life.plan()
    assert (plan.resumed, plan.rows[0].start) == ([a], 0)
    life.run()
    assert_tokens([a])


def test_blocks_that_fill_while_a_request_waits_are_found_when_it_is_admitted():
    life = Life(8, max_num_batched_tokens=8)
    life.add(request_of("a", prompt("ABC")), request_of("b", prompt("ABC", 1)))
    assert life.line() == "a[0:8]@0,1,2 | +a"  # b waits; A and B could be found
    assert life.line() == "a[8:12]@0,1,2 b[12:13]@0,1,2,3 | +b"
