"""What engines tell of KV memory, cache and chunks: counts, and a trace that leaves nothing out.

Engines run on the runner of `read_back`: their tokens mean nothing, their memory does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import m2_batching
import m3_paged
import m4_prefix_chunked
from helpers.engines import every_milestone, greedy, make_engine, run_to_end
from helpers.read_back import ReadBackRunner
from helpers.schedulers import prompt
from milestone_llm.core.kv import KVEvent
from milestone_llm.lab.explorer.positions import useful_share
from milestone_llm.trace.records import StepRecord

both_modes = pytest.mark.parametrize("preemption", ["recompute", "swap"])
PAGED = [m3_paged, m4_prefix_chunked]
paged = pytest.mark.parametrize("package", PAGED, ids=["m3", "m4"])


def traced_engine(package: Any, **fields: Any) -> Any:
    """An engine with blocks of 4 tokens, or regions."""
    if package is not m2_batching:
        fields = {"block_size": 4, **fields}
    runner = ReadBackRunner(fields.get("block_size"))
    fields = {"max_model_len": 32, "trace": "memory", **fields}
    return make_engine(package, runner=runner, **fields)


def add(engine: Any, *works: tuple[str, list[int], int], **params: Any) -> None:
    for name, token_ids, max_tokens in works:
        engine.add_request(token_ids, greedy(max_tokens, **params), name)


def run(engine: Any, *works: tuple[str, list[int], int], **params: Any) -> list[StepRecord]:
    """Serve; records of all steps."""
    add(engine, *works, **params)
    run_to_end(engine)
    return list(engine.tracer.records)


A, B = ("a", prompt("A"), 5), ("b", prompt("", 3), 5)
"""In memory for three blocks b has to go in step 2 and is back in step 5."""
TIGHT = {"max_model_len": 12, "kv_cache_tokens": 12}


def events(record: StepRecord, *types: str) -> list[tuple[str, str | None, list[int]]]:
    return [
        (each.type, each.request_id, each.blocks)
        for each in record.events
        if not types or each.type in types
    ]


# --- stats --------------------------------------------------------------------------------------


def test_a_region_reserves_max_model_len_whatever_it_stores():
    engine = traced_engine(m2_batching, max_num_seqs=3)
    add(engine, ("a", prompt("", 5), 9), ("b", prompt("", 5), 9))
    engine.step()
    engine.step()
    kv = engine.stats()["kv"]
    assert (kv["unit"], kv["total"], kv["used"], kv["free"], kv["watermark"]) == (
        ("region", 3, 2, 1, 2)
    )
    assert (kv["reserved_tokens"], kv["stored_tokens"]) == (2 * 32, 2 * 6)


def test_stored_reserved_and_wasted_tokens_of_two_requests():
    """6 tokens in 2 blocks of 4, and 4 in 1."""
    engine = traced_engine(m3_paged, kv_cache_tokens=256)
    add(engine, ("a", prompt("", 6), 2), ("b", prompt("", 4), 3))
    engine.step()
    kv = engine.stats()["kv"]
    assert (kv["unit"], kv["total"], kv["used"], kv["free"]) == ("block", 64, 3, 61)
    assert (kv["reserved_tokens"], kv["stored_tokens"], kv["wasted_tokens"]) == (12, 10, 2)
    assert kv["wasted_tokens_by_request"] == {"a": 2, "b": 0}
    engine.step()  # a's last: its blocks are free again
    kv = engine.stats()["kv"]
    assert (kv["used"], kv["watermark"], kv["cached"]) == (2, 4, 0)
    assert (kv["reserved_tokens"], kv["stored_tokens"]) == (8, 5)
    assert kv["wasted_tokens_by_request"] == {"b": 3}
    assert kv["bytes_per_token"] == 2 * 2 * 2 * 16 * 8, "2 layers, 2 KV heads, 16 doubles, K and V"


def test_shared_blocks_count_once():
    engine = traced_engine(m3_paged)
    add(engine, ("a", prompt("", 6), 4), n=3)
    engine.step()
    kv = engine.stats()["kv"]
    assert (kv["used"], kv["reserved_tokens"], kv["stored_tokens"]) == (2, 8, 6)
    engine.step()  # block 0 shared, and three blocks of 3 tokens each
    stats = engine.stats()
    assert (stats["kv"]["used"], stats["copied_blocks"]) == (4, 2)
    assert (stats["kv"]["reserved_tokens"], stats["kv"]["stored_tokens"]) == (16, 4 + 3 * 3)
    assert stats["kv"]["wasted_tokens_by_request"] == {"a": 1, "a/1": 1, "a/2": 1}


def test_queries_hits_tokens_saved_and_hit_rate():
    """Of 9 + 9 + 12 tokens asked for, b was saved 8 and c 4."""
    engine = traced_engine(m4_prefix_chunked)
    assert engine.stats()["prefix_cache"]["hit_rate"] == 0.0
    for name, token_ids in [("a", prompt("AB", 1)), ("b", prompt("AB", 1)), ("c", prompt("AXY"))]:
        run(engine, (name, token_ids, 1))
    assert engine.stats()["prefix_cache"] == {
        "queries": 3,
        "hits": 2,
        "queried_tokens": 30,
        "saved_tokens": 12,
        "evictions": 0,
        "hit_rate": 12 / 30,
    }
    assert engine.stats()["prefill_tokens"] == 30 - 12


def test_cached_counts_free_blocks_that_can_be_found_and_no_used_ones():
    engine = traced_engine(m4_prefix_chunked)
    add(engine, ("a", prompt("AB", 1), 2))
    engine.step()
    assert engine.stats()["kv"]["cached"] == 0
    run_to_end(engine)
    kv = engine.stats()["kv"]
    assert (kv["cached"], kv["used"], kv["free"]) == (2, 0, kv["total"])
    add(engine, ("b", prompt("A", 1), 2))
    engine.step()
    assert engine.stats()["kv"]["cached"] == 1
    engine.abort("b")
    assert engine.stats()["kv"]["cached"] == 2


def test_what_a_request_was_saved_on_its_arrival_and_its_preemptions_are_its_metrics():
    """b, preempted and resumed, finds its own blocks: that saves work, but none of its prompt's."""
    engine = traced_engine(m4_prefix_chunked, max_model_len=16, kv_cache_tokens=16)
    add(engine, ("a", prompt("A"), 6), ("b", prompt("BC"), 4))
    final = run_to_end(engine)
    assert [final[name].metrics.num_cached_tokens for name in "ab"] == [0, 0]
    assert [final[name].metrics.num_preemptions for name in "ab"] == [0, 1]
    cache = engine.stats()["prefix_cache"]
    assert (cache["queries"], cache["hits"], cache["saved_tokens"]) == (2, 0, 0)
    assert (cache["queried_tokens"], cache["hit_rate"]) == (4 + 8, 0.0)
    (back,) = [record for record in engine.tracer.records if record.resumed]
    assert [row.num_cached_tokens for row in back.batch if row.request_id == "b"] == [4]


@every_milestone
def test_a_core_keeps_nothing_of_who_has_ended_though_nobody_makes_outputs(package):
    """So it is on ranks that follow another, for days."""
    engine = make_engine(package)
    add(engine, ("a", prompt("", 5), 3), ("b", prompt("", 9), 40))
    core, log = engine.core, engine.step_log
    for _ in range(8):
        core.step()
        log.close_steps()
    assert set(log._recomputed.ends) == {"b"}
    core.finish_request(engine.requests["b"], "abort")
    log.close_steps()
    assert not log._recomputed.ends


# --- the trace ----------------------------------------------------------------------------------


def test_a_swap_in_the_trace():
    engine = traced_engine(m3_paged, **TIGHT, preemption="swap")
    records = run(engine, A, B)
    assert [record.swapped for record in records] == [[], [], ["b"], ["b"], ["b"], [], [], []]
    assert [record.waiting for record in records] == [[]] * 8
    out, back = records[2], records[5]
    assert out.preempted == [{"request_id": "b", "reason": "no free block for b"}]
    assert events(out) == [("swap_out", "b", [1]), ("free", "b", [1])]
    assert (back.resumed, back.admitted) == (["b"], [])
    assert events(back) == [("alloc", "b", [1, 2]), ("swap_in", "b", [1])]
    assert [(row.request_id, row.start, row.phase) for row in back.batch] == [("b", 4, "decode")]
    assert engine.scheduler.kv.preempter.host.events == []  # told as swaps, and not kept for ever


@paged
def test_a_failed_step_is_traced_with_what_it_freed_and_ends_all_completions(package):
    """Under M4 in the first chunk of the prompt, on which the second completion waits."""
    is_chunk = package is m4_prefix_chunked
    engine = traced_engine(package, max_num_batched_tokens=4 if is_chunk else 32)
    engine.core.runner.raise_at["launch"] = RuntimeError("out of luck")
    add(engine, ("a", prompt("", 6), 4), n=2)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    (record,) = engine.tracer.records
    ended = sorted(record.finished, key=lambda each: each["request_id"])
    assert ended == [{"request_id": name, "reason": "error"} for name in ("a", "a/1")]
    kinds = ["alloc", "free"] if is_chunk else ["alloc", "share", "free", "free"]
    assert [event.type for event in record.events] == kinds
    assert record.kv.used == 0
    (output,) = engine.step()
    assert [completion.finish_reason for completion in output.outputs] == ["error", "error"]
    assert not engine.has_unfinished_requests()


# --- the trace as a whole -----------------------------------------------------------------------


def random_run(package: Any, preemption: str) -> Iterator[Any]:
    """An engine to which requests with shared beginnings come faster than it has memory for.

    Yields it after each step.
    """
    rng = random.Random(4)
    engine = traced_engine(
        package,
        max_num_seqs=6,
        kv_cache_tokens=48,
        preemption=preemption,
        swap_space_tokens=24,
        **({"max_num_batched_tokens": 9} if package is m4_prefix_chunked else {}),
    )
    for number in range(25):
        shared = "ABC"[: rng.randint(0, 3)]
        token_ids = prompt(shared, rng.randint(not shared, 7), own=str(number))
        engine.add_request(token_ids, greedy(rng.randint(1, 12), n=rng.randint(1, 3)))
    while engine.has_unfinished_requests():
        engine.step()
        yield engine
        if len(engine.tracer.records) in (5, 17):
            engine.abort(rng.choice(list(engine.requests)))


@paged
@both_modes
def test_block_tables_and_stats_can_be_rebuilt_from_the_trace_alone(package, preemption):
    """Nothing happens to a block that the trace does not tell."""
    *_, engine = random_run(package, preemption)
    records, stats = engine.tracer.records, engine.stats()
    tables: dict[str | None, list[int]] = {}
    seen: set[str] = set()
    for record in records:
        rows = {row.request_id: row.blocks for row in record.batch}
        for event in record.events:
            if event.type == "free" and event.request_id in rows:  # its last step
                assert tables[event.request_id] == rows.pop(event.request_id)
            replay(event, tables)
            seen.add(event.type)
        for name, blocks in rows.items():
            assert tables[name] == blocks
        assert set(tables) == set(record.running)
        assert len({block for table in tables.values() for block in table}) == record.kv.used
        assert record.kv.cached <= record.kv.free
    assert tables == {}
    own = {"swap_out", "swap_in"} if preemption == "swap" else set()
    own |= {"evict"} if package is m4_prefix_chunked else set()
    assert seen == {"alloc", "free", "share", "copy_on_write"} | own

    assert stats["preemptions"] == sum(len(record.preempted) for record in records) > 0
    assert stats["recomputed_tokens"] > 0  # not all fit into host memory either
    computed = stats["prefill_tokens"] + stats["decode_tokens"]
    assert stats["useful_share"] == (computed - stats["recomputed_tokens"]) / computed
    assert useful_share(records) == stats["useful_share"]
    if package is m4_prefix_chunked:
        rows = [
            row
            for record in records
            for row in record.batch
            if row.request_id not in record.resumed
        ]
        cache = stats["prefix_cache"]
        assert cache["saved_tokens"] == sum(row.num_cached_tokens for row in rows) > 0
        assert cache["hits"] == sum(row.num_cached_tokens > 0 for row in rows)
        evicted = [event for record in records for event in record.events if event.type == "evict"]
        assert cache["evictions"] == sum(len(event.blocks) for event in evicted) > 0
        assert 0 < cache["hit_rate"] == cache["saved_tokens"] / cache["queried_tokens"] < 1


def replay(event: KVEvent, tables: dict[str | None, list[int]]) -> None:
    """Do to the tables what the event says."""
    name, blocks = event.request_id, event.blocks
    if event.type == "alloc":
        tables.setdefault(name, []).extend(blocks)
    elif event.type == "share":
        assert name not in tables
        tables[name] = list(blocks)
    elif event.type == "copy_on_write":
        source, copy = blocks
        tables[name][tables[name].index(source)] = copy
    elif event.type == "free":
        assert tables.pop(name) == blocks
        others = {block for table in tables.values() for block in table}
        assert event.held == [block for block in blocks if block in others]
    elif event.type in ("swap_out", "swap_in"):  # what is computed
        assert tables[name][: len(blocks)] == blocks


@paged
@both_modes
def test_at_every_step_all_are_in_one_queue_and_waste_less_than_a_block_each(package, preemption):
    watermark = 0
    for engine in random_run(package, preemption):
        record = engine.tracer.records[-1]
        queues = record.waiting + record.running + record.swapped
        assert len(queues) == len(set(queues))
        live = engine.driver.requests.values()
        forks = engine.scheduler.completions.further
        not_yet_forked = [fork for own in forks.values() for fork in own]
        expected = {c.request_id for c in live if not c.is_finished and c not in not_yet_forked}
        assert set(queues) == expected
        stats = engine.stats()
        kv, waste = stats["kv"], stats["kv"]["wasted_tokens_by_request"]
        assert len(waste) == stats["running"]
        if package is m3_paged:  # M4 reserves the blocks of a whole prompt
            assert all(0 <= wasted < 4 for wasted in waste.values())
        assert 0 <= kv["wasted_tokens"] <= sum(waste.values())
        assert kv["used"] + kv["free"] == kv["total"] == 12
        watermark = max(watermark, kv["used"])
        assert watermark <= kv["watermark"] <= kv["total"]
    assert kv["watermark"] == 12


# --- what a restart and further completions leave ------------------------------------------------


def test_figures_of_a_prompt_are_those_of_its_first_completion():
    engine = traced_engine(m4_prefix_chunked)
    engine.generate([prompt("AB")], greedy(2))
    (output,) = engine.generate([[*prompt("AB"), 7]], greedy(3, n=2))
    assert output.metrics.num_cached_tokens == 8


def test_a_cache_that_is_off_remembers_no_block():
    engine = traced_engine(m4_prefix_chunked, enable_prefix_caching=False, kv_cache_tokens=32)
    for _ in range(3):
        engine.generate([prompt("AB")], greedy(4))
    assert engine.step_log.scheduler.kv_usage().cached == 0
    assert engine.stats()["prefix_cache"]["evictions"] == 0


@paged
def test_after_a_failure_requests_are_resumed_and_arrivals_are_told(package, monkeypatch):
    """The step that arrivals were to be told with is dropped: the next one tells them."""
    engine = traced_engine(package)
    add(engine, ("old", [5, 6, 7], 6))
    engine.step()
    add(engine, ("new", [8, 9], 2))
    with monkeypatch.context() as patch:

        def fail(plan: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(engine.scheduler, "schedule", lambda: fail(None))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    run_to_end(engine)
    records = engine.tracer.records
    assert [name for record in records for name in record.arrived] == ["old", "new"]
    admitted = [name for record in records for name in record.admitted]
    assert sorted(admitted) == ["new", "old"], "who comes back is resumed"
