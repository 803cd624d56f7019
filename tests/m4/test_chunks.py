"""How the budget of a step is divided: decode rows, chunks under way, newcomers; in that order."""

from __future__ import annotations

from helpers.schedulers import Life, assert_tokens, of_length, spans


def uncached(*args: int, **fields: object) -> Life:
    """Chunks alone, so that no prompt is shortened by another."""
    return Life(*args, enable_prefix_caching=False, **fields)


def all_spans(life: Life) -> list[str]:
    """Those of all steps that are left."""
    lines = []
    while life.scheduler.has_unfinished_requests():
        lines.append(spans(life.plan()))
    return lines


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


def test_under_priority_the_budget_goes_to_the_most_urgent_first():
    life = uncached(16, max_num_batched_tokens=4, policy="priority")
    life.add(of_length("late", 6, priority=2))
    life.plan()
    life.add(of_length("soon", 6, priority=0))
    assert all_spans(life) == ["late[4:6] soon[0:2]", "soon[2:6]"]
    life.add(of_length("late", 10, priority=2), of_length("soon", 1, 9, priority=0))
    assert all_spans(life)[:2] == ["soon[0:1] late[0:3]", "soon[1:2] late[3:6]"]


def test_a_whole_prompt_reserves_its_blocks_at_admission():
    life = uncached(8, max_num_batched_tokens=2)
    life.add(of_length("a", 17))
    assert life.line() == "a[0:2]@0,1,2,3,4 | +a"
    usage = life.scheduler.kv_usage()
    assert (usage.used, usage.reserved_tokens, usage.stored_tokens) == (5, 20, 2)


def test_prefill_first_decodes_when_newcomers_do_not_fit():
    """A waiting prompt that has no memory stalls nobody: it would stall them for ever."""
    life = uncached(4, prefill_policy="prefill_first")
    a, b = of_length("a", 10, 3), of_length("b", 9)
    life.add(a, b)
    assert all_spans(life) == ["a[0:10]", "a[10:11]", "a[11:12]", "b[0:9]"]
    assert_tokens([a, b])
