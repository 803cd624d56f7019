"""How the budget of a step is divided: decode rows, chunks under way, newcomers; in that order."""

from __future__ import annotations

import pytest

from scheduler_helpers import Life, assert_tokens, of_length, spans


def uncached(*args: int, **fields: object) -> Life:
    """Chunks alone, so that no prompt is shortened by another."""
    return Life(*args, enable_prefix_caching=False, **fields)


def all_spans(life: Life) -> list[str]:
    """Those of all steps that are left."""
    lines = []
    while life.scheduler.has_unfinished_requests():
        lines.append(spans(life.plan()))
    return lines


# --- who gets how much --------------------------------------------------------------------------


def test_a_row_that_stops_short_of_the_last_known_token_samples_nothing():
    life = uncached(max_num_batched_tokens=4)
    a = of_length("a", 9, 2)
    life.add(a)
    for num_computed, num_outputs in [(4, 0), (8, 0), (9, 1), (10, 2)]:
        plan = life.scheduler.schedule()
        (row,) = plan.rows
        sampled = life.device.run(plan)
        assert set(sampled) == ({"a"} if num_outputs else set())
        assert row.sampling_requests == ([a] if num_outputs else [])
        outputs = life.scheduler.update(plan, sampled)
        assert len(outputs) == (num_outputs > 0), "nothing has changed for the user"
        assert (a.num_computed_tokens, a.num_output_tokens) == (num_computed, num_outputs)


@pytest.mark.parametrize("budget", range(1, 12))
def test_any_budget_from_one_token_up_gives_the_same_tokens(budget):
    """Also one smaller than `max_num_seqs`, where not even all decode rows fit."""
    life = uncached(16, max_num_batched_tokens=budget, max_num_seqs=4)
    requests = [of_length(name, num, 4) for name, num in [("a", 1), ("b", 7), ("c", 3), ("d", 11)]]
    life.add(*requests)
    while life.scheduler.has_unfinished_requests():
        plan = life.plan()
        assert 1 <= plan.num_tokens <= budget
    assert_tokens(requests)


def test_where_not_all_decode_rows_fit_the_seniors_go_on():
    life = uncached(16, max_num_batched_tokens=2)
    life.add(*(of_length(name, 1, 3) for name in "abcd"))
    assert all_spans(life) == [
        "a[0:1] b[0:1]",
        "a[1:2] b[1:2]",
        "a[2:3] b[2:3]",
        "c[0:1] d[0:1]",
        "c[1:2] d[1:2]",
        "c[2:3] d[2:3]",
    ]


def test_under_priority_the_budget_goes_to_the_most_urgent_first():
    life = uncached(16, max_num_batched_tokens=4, policy="priority")
    life.add(of_length("late", 6, priority=2))
    life.plan()
    life.add(of_length("soon", 6, priority=0))
    assert all_spans(life) == ["late[4:6] soon[0:2]", "soon[2:6]"]
    life.add(of_length("late", 10, priority=2), of_length("soon", 1, 9, priority=0))
    assert all_spans(life)[:2] == ["soon[0:1] late[0:3]", "soon[1:2] late[3:6]"]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0, ["a[0:8]", "a[8:10] b[0:6]", "b[6:9] c[0:3]"]),
        (3, ["a[0:3] b[0:3] c[0:2]", "c[2:3] a[3:6] b[3:6]", "a[6:9] b[6:9]", "a[9:10]"]),
        (6, ["a[0:6] b[0:2]", "a[6:10] b[2:6]", "b[6:9] c[0:3]"]),
        (100, ["a[0:8]", "a[8:10] b[0:6]", "b[6:9] c[0:3]"]),
    ],
)
def test_long_prefill_token_threshold_caps_a_row_and_leaves_the_rest_to_others(threshold, expected):
    life = uncached(16, max_num_batched_tokens=8, long_prefill_token_threshold=threshold)
    life.add(of_length("a", 10), of_length("b", 9), of_length("c", 3))
    assert all_spans(life) == expected


# --- memory -------------------------------------------------------------------------------------


def test_a_whole_prompt_reserves_its_blocks_at_admission():
    life = uncached(8, max_num_batched_tokens=2)
    life.add(of_length("a", 17))
    assert life.line() == "a[0:2]@0,1,2,3,4 | +a"
    usage = life.scheduler.kv_usage()
    assert (usage.used, usage.reserved_tokens, usage.stored_tokens) == (5, 20, 2)


def test_who_does_not_fit_whole_waits_and_nobody_passes_it():
    """b would fit in chunk by chunk; it would then wait with its blocks in hand."""
    life = uncached(8, max_num_batched_tokens=8)
    a, b, c = of_length("a", 20, 3), of_length("b", 13), of_length("c", 1)
    life.add(a, b, c)
    lines = [spans(life.plan())]
    reason = life.scheduler.reason_to_wait(b, 8)
    assert reason == "no KV memory: blocks needed 4, free 3"
    lines += all_spans(life)
    assert lines[:4] == ["a[0:8]", "a[8:16]", "a[16:20]", "a[20:21]"]
    assert lines[-2:] == ["b[0:8]", "b[8:13] c[0:1]"]


def test_prefill_first_decodes_when_newcomers_do_not_fit():
    """A waiting prompt that has no memory stalls nobody: it would stall them for ever."""
    life = uncached(4, prefill_policy="prefill_first")
    a, b = of_length("a", 10, 3), of_length("b", 9)
    life.add(a, b)
    assert all_spans(life) == ["a[0:10]", "a[10:11]", "a[11:12]", "b[0:9]"]
    assert_tokens([a, b])
