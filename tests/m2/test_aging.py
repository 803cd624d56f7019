"""Aging: under a flood of urgent requests, whoever has waited long enough is served."""

import itertools

import pytest

import m2_batching
import m3_paged
from helpers.engines import PACKAGES, assert_empty, greedy, make_engine
from helpers.read_back import ReadBackRunner
from m5_kernels.extras.tensor_parallel.rank_peers import NewRequest
from milestone_llm.core.errors import InputError

FLOOD = 40  # seconds, one urgent request in each
milestones = pytest.mark.parametrize("package", PACKAGES[1:], ids=lambda each: each.__name__)


@pytest.fixture
def clock(monkeypatch):
    """Seconds for the input processor; the test moves them on."""
    now = [100.0]
    monkeypatch.setattr("milestone_llm.frontend.input_processor.perf_counter", lambda: now[0])
    return now


def served_at(engine, clock):
    """When the request that is in no hurry gets its first token, and how many urgent ones wait."""
    engine.add_request([1, 2, 3], greedy(2), request_id="patient", priority=5)
    for second in itertools.count():
        if second < FLOOD:
            engine.add_request([4, 5, 6], greedy(2), priority=0)
        for _ in range(2):  # one row: a request a second is all that it can serve
            if any(output.request_id == "patient" for output in engine.step()):
                return second
        clock[0] += 1


@milestones
def test_nobody_starves_under_a_flood_of_urgent_requests(package, clock):
    def engine(**fields):
        runner = ReadBackRunner(None if package is m2_batching else 16)
        fields |= {"max_model_len": 16, "runner": runner}
        return make_engine(package, max_num_seqs=1, policy="priority", **fields)

    assert served_at(engine(), clock) >= FLOOD, "without aging it waits for the end of the flood"
    aging = engine(aging_seconds=2)
    second = served_at(aging, clock)
    assert 8 <= second <= 20, f"after 5 * 2 s it is as urgent as newcomers, served at {second} s"
    for name in list(aging.requests):
        aging.abort(name)
    assert_empty(aging)


def test_memory_is_taken_from_the_youngest_of_equal_priority(clock):
    engine = make_engine(
        m3_paged, policy="priority", aging_seconds=1, block_size=4, kv_cache_tokens=16,
        max_model_len=16,
    )  # fmt: skip
    engine.add_request([1, 2, 3, 4], greedy(8), request_id="old", priority=3)
    clock[0] += 10
    engine.add_request([5, 6, 7, 8], greedy(8), request_id="new", priority=0)
    engine.step()
    assert [each.request_id for each in engine.scheduler.by_seniority()] == ["old", "new"]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.metrics.num_preemptions == (output.request_id == "new")


def test_other_ranks_get_the_very_same_priority(clock):
    engine = make_engine(m2_batching, policy="priority", aging_seconds=7)
    clock[0] += 1
    name = engine.add_request([1, 2], greedy(2), priority=3)
    assert NewRequest.of([engine.requests[name]]).priority == 3 + 1 / 7


def test_a_priority_that_no_float_holds_is_refused(clock):
    engine = make_engine(m2_batching, policy="priority", aging_seconds=2)
    with pytest.raises(InputError, match="priority must be a whole number in"):
        engine.add_request([1, 2], priority=10**400)
