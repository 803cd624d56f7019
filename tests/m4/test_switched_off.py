"""With both switches off M4 plans what M3 plans, block for block; with one off, the other works."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

import paged_helpers
from paged_helpers import completions, plan_line
from prefix_helpers import Life, prompt, request_of


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 12),
    preemption=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_with_both_switches_off_every_plan_is_m3s(seed, num_requests, preemption, policy):
    rng = random.Random(seed)
    block_size, max_model_len = rng.choice([1, 3, 4]), rng.randint(2, 24)
    limits = {
        "num_blocks": -(-max_model_len // block_size) + rng.choice([0, 2, 9]),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": max_model_len + 5,
        "preemption": preemption,
        "policy": policy,
    }
    m4 = Life(**limits, enable_prefix_caching=False, enable_chunked_prefill=False)
    m3 = paged_helpers.make_scheduler(**limits)
    device = paged_helpers.PagedDevice(m3)
    sizes = [(rng.randint(1, max_model_len - 1), rng.randint(1, 12)) for _ in range(num_requests)]
    options = [
        {"n": rng.randint(1, limits["max_num_seqs"]), "priority": rng.randint(0, 1), "arrival": i}
        for i in range(num_requests)
    ]
    num_arrived = 0
    while num_arrived < num_requests or m3.has_unfinished_requests():
        for i in range(num_arrived, min(num_requests, num_arrived + rng.randint(0, 3))):
            num_tokens, max_tokens = sizes[i]
            for scheduler in (m4.scheduler, m3):  # equal beginnings: much to find, if it looked
                token_ids = list(range(num_tokens))
                request = request_of(f"r{i}", token_ids, max_tokens, **options[i])
                scheduler.add(*completions(request))
            num_arrived += 1
        if m3.has_unfinished_requests():
            plan = paged_helpers.step(m3, device)
            assert m4.line() == plan_line(plan)
            assert m4.scheduler.kv_usage() == m3.kv_usage()
            assert m4.scheduler.drain_events() == m3.drain_events()
    assert not m4.scheduler.has_unfinished_requests()


AGAIN = prompt("AB", 2)


def test_caching_works_without_chunks_and_a_hit_leaves_more_of_the_step_to_others():
    """b has 21 tokens and c 42, of which 40 are cached: they share a step of 48."""
    life = Life(24, max_model_len=48, enable_chunked_prefill=False, max_num_batched_tokens=48)
    life.run(request_of("a", prompt("ABCDEFGHIJ", 1)))
    b, c = request_of("b", prompt("VWXYZ", 1)), request_of("c", prompt("ABCDEFGHIJ", 2))
    life.add(b, c)
    plan = life.plan()
    assert [(row.start, row.end) for row in plan.rows] == [(0, 21), (40, 42)]
    assert plan.admitted == [b, c]


def test_chunks_work_without_caching():
    life = Life(enable_prefix_caching=False, max_num_batched_tokens=4)
    for name in "ab":
        lines = life.run(request_of(name, AGAIN))
        assert [line.split("@")[0] for line in lines] == [
            f"{name}[0:4]",
            f"{name}[4:8]",
            f"{name}[8:10]",
        ]
