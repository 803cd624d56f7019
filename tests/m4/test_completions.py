"""Completions (n > 1) of a prompt that comes in chunks, from the cache, or is interrupted."""

from __future__ import annotations

import pytest

from milestone_llm.core.request import RequestStatus
from paged_helpers import completions
from prefix_helpers import Life, assert_tokens, prompt, request_of

both_modes = pytest.mark.parametrize("preemption", ["recompute", "swap"])


def test_forks_wait_until_the_last_chunk_of_their_prompt():
    life = Life(max_num_batched_tokens=4)
    a = request_of("a", prompt("AB", 2), 3, n=3)
    life.add(a)
    for num_computed in (4, 8):
        life.plan()
        assert (
            a.num_computed_tokens,
            len(life.scheduler.completions.forks.get(a, [])),
            len(life.scheduler.running),
        ) == (
            num_computed,
            2,
            1,
        )
        assert [fork.status for fork in life.scheduler.completions.forks[a]] == [
            RequestStatus.WAITING
        ] * 2
    life.plan()
    assert (life.scheduler.completions.forks, len(life.scheduler.running)) == ({}, 3)
    assert [completion.num_output_tokens for completion in completions(a)] == [1, 1, 1]
    life.run()
    assert_tokens(completions(a))
    assert len({tuple(completion.token_ids) for completion in completions(a)}) == 3


def test_forks_that_have_not_started_are_counted_as_seats():
    life = Life(16, max_num_batched_tokens=4, max_num_seqs=4)
    a, b, c = (
        request_of(name, prompt(name, 2), 2, n=n) for name, n in [("a", 3), ("b", 2), ("c", 1)]
    )
    life.add(a, b, c)
    life.plan()
    assert [request.request_id for request in life.scheduler.running] == ["a"]
    assert life.scheduler.reason_to_wait(b, 4) == "max_num_seqs=4, running: 3"
    assert life.scheduler.reason_to_wait(c, 4) is None, "there is a seat, but b comes first"
    life.run()
    for leader in (a, b, c):
        assert_tokens(completions(leader))


def test_further_completions_are_refused_above_max_num_seqs_also_in_chunks():
    life = Life(max_num_seqs=3)
    with pytest.raises(ValueError, match=r"n=4 .* max_num_seqs=3"):
        life.add(request_of("a", prompt("A"), n=4))


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_more_completions_than_a_step_has_tokens_take_turns(budget):
    life = Life(16, max_num_batched_tokens=budget)
    a = request_of("a", prompt("A", 2), 5, n=4)
    life.run(a)


def test_completions_of_a_wholly_cached_prompt_fork_from_one_computed_token():
    life = Life()
    life.run(request_of("a", prompt("AB")))
    lines = life.run(request_of("b", prompt("AB"), 2, n=3))
    assert lines == [
        "b[7:8]@0,1 | +b +b/1 +b/2",
        "b[8:9]@0,1,2 b/1[8:9]@0,1,3 b/2[8:9]@0,1,4",
    ]


def test_every_completion_caches_its_own_blocks():
    life = Life(16)
    a = request_of("a", prompt("A", 2), 4, n=3)
    life.run(a)
    for completion in completions(a):
        follow_up = request_of(f"{completion.request_id}+", completion.token_ids)
        life.run(follow_up)
        assert follow_up.num_cached_tokens == 8


@both_modes
def test_a_half_computed_leader_is_preempted_and_resumed_with_its_forks_still_waiting(preemption):
    life = Life(6, max_num_batched_tokens=3, preemption=preemption)
    a, b = request_of("a", prompt("", 4), 10), request_of("b", prompt("BCDE"), 3, n=2)
    life.add(a, b)
    while not (plan := life.plan()).preempted:
        pass
    assert [p.request for p in plan.preempted] == [b]
    assert 0 < b.num_computed_tokens < 16 or preemption == "recompute"
    assert len(life.scheduler.completions.forks[b]) == 1
    while not (plan := life.plan()).resumed:
        pass
    assert (plan.resumed, plan.admitted) == ([b], []), "its fork was admitted before, once"
    life.run()
    assert_tokens([a, *completions(b)])


@both_modes
@pytest.mark.parametrize("num_steps", range(1, 13))
def test_abort_of_completions_in_whatever_state_gives_all_back(num_steps, preemption):
    """Half computed, preempted half computed, forked, decoding."""
    life = Life(6, max_num_batched_tokens=3, preemption=preemption)
    a, b = request_of("a", prompt("", 4), 10), request_of("b", prompt("BCD"), 3, n=2)
    life.add(a, b)
    for _ in range(num_steps):
        life.plan()
    life.abort(b)
    assert set(life.kv.block_tables) <= {"a"}
    assert life.scheduler.preempter.host.block_tables == {}
    assert set(life.cache.hashes) <= {"a"}
    assert [completion.finish_reason for completion in completions(b)] == ["abort", "abort"]
    life.run()
    assert_tokens([a])


def test_one_completion_aborted_before_the_prompt_is_complete_leaves_the_others():
    life = Life(max_num_batched_tokens=4)
    a = request_of("a", prompt("AB", 2), 3, n=3)
    life.add(a)
    life.plan()
    life.scheduler.finish(completions(a)[1], "abort")
    life.run()
    assert completions(a)[1].finish_reason == "abort"
    assert_tokens([completions(a)[0], completions(a)[2]])


def test_a_step_that_raises_on_a_chunk_ends_the_leader_and_its_waiting_forks():
    life = Life(max_num_batched_tokens=4)
    a = request_of("a", prompt("AB", 2), 3, n=3)
    life.add(a)
    life.plan()
    life.fail()
    assert [completion.finish_reason for completion in completions(a)] == ["error"] * 3
    assert life.kv.pool.num_used == 0
    again = request_of("a", prompt("AB", 2), 3, n=3)
    assert life.run(again)[0].startswith("a[0:4]")


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_completions_of_a_prompt_that_has_no_row_in_a_step_that_raises_go_on(num_steps):
    """Half computed they fork later; once forked each computes its own tokens again."""
    life = Life(16, max_num_batched_tokens=4, policy="priority", prefill_policy="prefill_first")
    a = request_of("a", prompt("A", 2), 3, n=2, priority=1)
    life.add(a)
    for _ in range(num_steps):
        life.plan()
    assert len(life.scheduler.completions.forks.get(a, [])) == (num_steps == 1)
    b = request_of("b", prompt("BC"), 2)
    life.add(b)
    while not b.num_computed_tokens:
        life.plan()
    plan = life.fail()
    assert [row.request for row in plan.rows] == [b]
    assert (b.finish_reason, a.finish_reason) == ("error", None)
    life.run()
    assert_tokens(completions(a))


@both_modes
def test_completions_that_start_in_a_step_are_not_its_victims(preemption):
    """b, junior to a, lacks a block in the step that computes the last token of a's prompt."""
    life = Life(3, preemption=preemption, long_prefill_token_threshold=4)
    a, b = request_of("a", prompt("A", 1), 4, n=2), request_of("b", prompt("B"), 4)
    life.add(a, b)
    life.plan()
    assert (a.num_computed_tokens, b.num_computed_tokens) == (4, 4)
    plan = life.plan()
    assert [preemption.request for preemption in plan.preempted] == [b]
    assert plan.admitted == [completions(a)[1]]
    life.run()
    assert_tokens([*completions(a), b])
