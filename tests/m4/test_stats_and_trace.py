"""What the engine tells of cache and chunks: counts, rates, and a trace that leaves nothing out."""

from __future__ import annotations

import random
from typing import Any

import pytest

import m4_prefix_chunked
from engine_helpers import greedy, make_engine, run_to_end
from milestone_llm.core.kv import KVEvent
from milestone_llm.core.outputs import SampledToken
from milestone_llm.trace.records import StepRecord
from paged_helpers import PagedDevice
from prefix_helpers import prompt as wide_prompt


def prompt(*args: Any, **fields: Any) -> list[int]:
    """As `prefix_helpers.prompt`, within the tiny model's vocabulary."""
    return [token % 199 for token in wide_prompt(*args, **fields)]


class SmallVocabularyDevice(PagedDevice):
    """The device of lists; its tokens mean nothing, its blocks do."""

    def run(self, plan: Any) -> Any:
        sampled = super().run(plan)
        return {name: [SampledToken(token.token_id % 199)] for name, (token,) in sampled.items()}


def traced_engine(**fields: Any) -> Any:
    engine = make_engine(
        m4_prefix_chunked, **{"max_model_len": 32, "block_size": 4, "trace": "memory", **fields}
    )
    engine.core.runner = SmallVocabularyDevice(engine.scheduler)
    return engine


def events(record: StepRecord, *types: str) -> list[tuple]:
    return [(e.type, e.request_id, e.blocks) for e in record.events if e.type in types]


# --- stats --------------------------------------------------------------------------------------


def test_queries_hits_tokens_saved_and_hit_rate():
    """Of 9 + 9 + 12 tokens asked for, b was saved 8 and c 4."""
    engine = traced_engine()
    assert engine.stats()["prefix_cache"]["hit_rate"] == 0.0
    for name, token_ids in [("a", prompt("AB", 1)), ("b", prompt("AB", 1)), ("c", prompt("AXY"))]:
        engine.add_request(token_ids, greedy(1), name)
        run_to_end(engine)
    assert engine.stats()["prefix_cache"] == {
        "queries": 3,
        "hits": 2,
        "queried_tokens": 30,
        "saved_tokens": 12,
        "evictions": 0,
        "hit_rate": 12 / 30,
    }
    assert engine.stats()["prefill_tokens"] == 30 - 12


def test_evictions_are_counted_and_traced_with_their_blocks():
    engine = traced_engine(kv_cache_tokens=32, max_num_seqs=1)
    for name, token_ids in [("a", prompt("ABC", 1)), ("b", prompt("UVWXYZ", 1))]:
        engine.add_request(token_ids, greedy(1), name)
        run_to_end(engine)
    first, second = engine.tracer.records
    assert events(first, "evict") == []
    assert events(second, "evict") == [("evict", None, [2]), ("evict", None, [1])]
    assert engine.stats()["prefix_cache"]["evictions"] == 2
    assert [record.kv.cached for record in engine.tracer.records] == [3, 1 + 6]


def test_a_hit_in_the_trace():
    engine = traced_engine()
    engine.add_request(prompt("AB", 1), greedy(2), "a")
    engine.step()
    engine.add_request(prompt("AB", 3), greedy(1), "b")
    engine.step()
    record = engine.tracer.records[-1]
    assert events(record, "share", "alloc") == [("share", "b", [0, 1]), ("alloc", "b", [3])]
    row = record.batch[1]
    assert (row.request_id, row.phase, row.start) == ("b", "prefill", 8)
    assert (row.num_new_tokens, row.num_cached_tokens, row.blocks) == (3, 8, [0, 1, 3])
    assert (record.num_prefill_tokens, record.num_decode_tokens) == (3, 1)


def test_a_copy_in_the_trace():
    engine = traced_engine()
    engine.add_request(prompt("AB"), greedy(4), "a")
    engine.step()
    engine.add_request(prompt("AB"), greedy(1), "b")
    engine.step()
    record = engine.tracer.records[-1]
    assert events(record, "share", "copy_on_write") == [
        ("share", "b", [0, 1]),
        ("copy_on_write", "b", [1, 3]),
    ]
    assert [row.num_cached_tokens for row in record.batch] == [0, 7]


def test_chunks_in_the_trace_sample_nothing_but_the_last():
    engine = traced_engine(max_num_batched_tokens=4)
    engine.add_request(prompt("AB", 2), greedy(2), "a")
    run_to_end(engine)
    rows = [record.batch[0] for record in engine.tracer.records]
    assert [(row.phase, row.start, row.num_new_tokens) for row in rows] == [
        ("prefill", 0, 4),
        ("prefill", 4, 4),
        ("prefill", 8, 2),
        ("decode", 10, 1),
    ]
    assert [row.sampled_token is None for row in rows] == [True, True, False, False]
    assert [record.admitted for record in engine.tracer.records] == [["a"], [], [], []]
    assert [record.kv.stored_tokens for record in engine.tracer.records] == [4, 8, 10, 0]
    assert {record.milestone for record in engine.tracer.records} == {"m4_prefix_chunked"}


def test_cached_counts_free_blocks_that_can_be_found_and_no_used_ones():
    engine = traced_engine()
    engine.add_request(prompt("AB", 1), greedy(2), "a")
    engine.step()
    assert engine.stats()["kv"]["cached"] == 0
    run_to_end(engine)
    kv = engine.stats()["kv"]
    assert (kv["cached"], kv["used"], kv["free"]) == (2, 0, kv["total"])
    engine.add_request(prompt("A", 1), greedy(2), "b")
    engine.step()
    assert engine.stats()["kv"]["cached"] == 1
    engine.abort("b")
    assert engine.stats()["kv"]["cached"] == 2


def test_a_requests_metrics_count_what_was_saved_on_its_arrival_only():
    """b, preempted and resumed, finds its own blocks: that saves work, but none of its prompt's."""
    engine = traced_engine(max_model_len=16, kv_cache_tokens=16)
    engine.add_request(prompt("A"), greedy(6), "a")
    engine.add_request(prompt("BC"), greedy(4), "b")
    final = run_to_end(engine)
    assert [final[name].metrics.num_cached_tokens for name in "ab"] == [0, 0]
    assert final["b"].metrics.num_preemptions == 1
    assert engine.stats()["prefix_cache"]["saved_tokens"] == 4
    (back,) = [record for record in engine.tracer.records if record.resumed]
    assert [row.num_cached_tokens for row in back.batch if row.request_id == "b"] == [4]


# --- the trace as a whole -----------------------------------------------------------------------


def random_run(seed: int, preemption: str) -> Any:
    """An engine to which requests with shared beginnings came faster than it had memory for."""
    rng = random.Random(seed)
    engine = traced_engine(
        max_num_seqs=6,
        kv_cache_tokens=48,
        preemption=preemption,
        swap_space_tokens=24,
        max_num_batched_tokens=9,
    )
    for number in range(25):
        shared = "ABC"[: rng.randint(0, 3)]
        token_ids = prompt(shared, rng.randint(not shared, 7), own=str(number))
        engine.add_request(token_ids, greedy(rng.randint(1, 12), n=rng.randint(1, 2)))
    while engine.has_unfinished_requests():
        engine.step()
        if len(engine.tracer.records) in (5, 17):
            engine.abort(rng.choice(list(engine.requests)))
    return engine


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_block_tables_can_be_rebuilt_from_the_events_alone(preemption):
    """Nothing happens to a block that the trace does not tell."""
    engine = random_run(4, preemption)
    tables: dict[str, list[int]] = {}
    seen: set[str] = set()
    for record in engine.tracer.records:
        rows = {row.request_id: row.blocks for row in record.batch}
        for event in record.events:
            if event.type == "free" and event.request_id in rows:  # its last step
                assert tables[event.request_id] == rows.pop(event.request_id)
            replay(event, tables)
            seen.add(event.type)
        for name, blocks in rows.items():
            assert tables[name] == blocks
        assert set(tables) == set(record.running)
        used = {block for table in tables.values() for block in table}
        assert len(used) == record.kv.used
        assert record.kv.cached <= record.kv.free
    assert tables == {}
    swaps = {"swap_out", "swap_in"} if preemption == "swap" else set()
    assert seen == {"alloc", "free", "share", "copy_on_write", "evict"} | swaps


def replay(event: KVEvent, tables: dict[str, list[int]]) -> None:
    """Do to the tables what the event says."""
    name, blocks = event.request_id, event.blocks
    if event.type == "alloc":
        tables.setdefault(str(name), []).extend(blocks)
    elif event.type == "share":
        assert name not in tables
        tables[str(name)] = list(blocks)
    elif event.type == "copy_on_write":
        source, copy = blocks
        table = tables[str(name)]
        table[table.index(source)] = copy
    elif event.type == "free":
        assert tables.pop(str(name)) == blocks
        others = {block for table in tables.values() for block in table}
        assert event.held == [block for block in blocks if block in others]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_stats_are_the_sums_of_the_trace(preemption):
    engine = random_run(5, preemption)
    records, stats = engine.tracer.records, engine.stats()
    rows = [row for record in records for row in record.batch]
    cache = stats["prefix_cache"]
    assert cache["saved_tokens"] == sum(row.num_cached_tokens for row in rows) > 0
    assert cache["hits"] == sum(row.num_cached_tokens > 0 for row in rows)
    evicted = [event for record in records for event in record.events if event.type == "evict"]
    assert cache["evictions"] == sum(len(event.blocks) for event in evicted) > 0
    assert stats["preemptions"] == sum(len(record.preempted) for record in records) > 0
    assert 0 < cache["hit_rate"] == cache["saved_tokens"] / cache["queried_tokens"] < 1
    assert max(record.num_prefill_tokens + record.num_decode_tokens for record in records) <= 9
