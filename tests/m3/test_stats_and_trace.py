"""What the engine tells about KV memory: counts, waste, and a trace that leaves nothing out."""

from __future__ import annotations

import random

import pytest

import m3_paged
from engine_helpers import every_milestone, greedy, make_engine, random_prompts, run_to_end
from milestone_llm.core.kv import KVEvent
from milestone_llm.lab.trace.positions import useful_share
from paged_helpers import PagedDevice


def traced_engine(**fields):
    """An engine that runs on a device of lists: its tokens mean nothing, its blocks do."""
    engine = make_engine(
        m3_paged, **{"max_model_len": 64, "block_size": 4, "trace": "memory", **fields}
    )
    engine.core.runner = PagedDevice(engine.scheduler)
    return engine


def add(engine, *sizes: tuple[str, int, int]) -> None:
    for name, num_prompt_tokens, max_tokens in sizes:
        (prompt,) = random_prompts([num_prompt_tokens])
        engine.add_request(prompt, greedy(max_tokens), name)


def random_run(seed: int, preemption: str):
    """Steps of an engine to which requests come faster than it has memory for."""
    rng = random.Random(seed)
    engine = traced_engine(
        max_num_seqs=6,
        max_model_len=30,
        kv_cache_tokens=48,
        preemption=preemption,
        swap_space_tokens=24,
    )
    for number in range(25):
        (prompt,) = random_prompts([rng.randint(1, 20)], seed=number)
        engine.add_request(prompt, greedy(rng.randint(1, 12), n=rng.randint(1, 3)))
    aborted = set(rng.sample(range(25), 3))
    while engine.has_unfinished_requests():
        engine.step()
        yield engine
        if len(engine.tracer.records) in aborted:
            engine.abort(rng.choice(list(engine.requests)))


# --- stats --------------------------------------------------------------------------------------


def test_stored_reserved_and_wasted_tokens_of_two_requests():
    """6 tokens in 2 blocks of 4, and 4 in 1."""
    engine = traced_engine()
    add(engine, ("a", 6, 2), ("b", 4, 3))
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


def test_shared_blocks_count_once():
    engine = traced_engine()
    (prompt,) = random_prompts([6])
    engine.add_request(prompt, greedy(4, n=3), "a")
    engine.step()
    kv = engine.stats()["kv"]
    assert (kv["used"], kv["reserved_tokens"], kv["stored_tokens"]) == (2, 8, 6)
    engine.step()  # block 0 shared, and three blocks of 3 tokens each
    stats = engine.stats()
    assert (stats["kv"]["used"], stats["copied_blocks"]) == (4, 2)
    assert (stats["kv"]["reserved_tokens"], stats["kv"]["stored_tokens"]) == (16, 4 + 3 * 3)
    assert stats["kv"]["wasted_tokens_by_request"] == {"a": 1, "a/1": 1, "a/2": 1}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_waste_is_less_than_a_block_a_request(preemption):
    """Internal fragmentation: the empty slots of each table's last block, and nothing else."""
    watermark = 0
    for engine in random_run(3, preemption):
        kv, num_running = engine.stats()["kv"], engine.stats()["running"]
        waste = kv["wasted_tokens_by_request"]
        assert len(waste) == num_running
        assert all(0 <= wasted < 4 for wasted in waste.values())
        assert 0 <= kv["wasted_tokens"] <= sum(waste.values())
        assert kv["used"] + kv["free"] == kv["total"] == 12
        watermark = max(watermark, kv["used"])
        assert watermark <= kv["watermark"] <= kv["total"]
    assert engine.stats()["kv"]["watermark"] == 12
    assert engine.stats()["preemptions"] > 5


def test_bytes_per_token_count_keys_and_values_of_all_layers():
    """2 layers x 2 KV heads x 16 numbers of 8 bytes, twice."""
    assert make_engine(m3_paged).stats()["kv"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 8


def test_a_requests_metrics_count_its_preemptions():
    engine = traced_engine(max_model_len=12, kv_cache_tokens=12)
    add(engine, ("a", 4, 5), ("b", 3, 5))
    final = run_to_end(engine)
    assert [final[name].metrics.num_preemptions for name in "ab"] == [0, 1]
    assert engine.stats()["preemptions"] == 1


# --- the trace ----------------------------------------------------------------------------------


def events(record) -> list[tuple]:
    return [(event.type, event.request_id, event.blocks) for event in record.events]


def test_a_swap_in_the_trace():
    engine = traced_engine(max_model_len=12, kv_cache_tokens=12, preemption="swap")
    add(engine, ("a", 4, 5), ("b", 3, 5))
    run_to_end(engine)
    records = engine.tracer.records
    assert [record.swapped for record in records] == [[], [], ["b"], ["b"], ["b"], [], [], []]
    assert [record.waiting for record in records] == [[]] * 8
    assert events(records[0]) == [("alloc", "a", [0]), ("alloc", "b", [1])]
    assert events(records[1]) == [("alloc", "a", [2])]
    out, back = records[2], records[5]
    assert out.preempted == [{"request_id": "b", "reason": "no free block for b"}]
    assert events(out) == [("swap_out", "b", [1]), ("free", "b", [1])]
    assert [(row.request_id, row.blocks) for row in out.batch] == [("a", [0, 2])]
    assert (back.resumed, back.admitted) == (["b"], [])
    assert events(back) == [("alloc", "b", [1, 2]), ("swap_in", "b", [1])]
    assert [(row.request_id, row.start, row.phase) for row in back.batch] == [("b", 4, "decode")]
    assert engine.scheduler.preempter.host.events == []  # told as swaps, and not kept for ever


def test_a_recomputation_in_the_trace():
    engine = traced_engine(max_model_len=12, kv_cache_tokens=12)
    add(engine, ("a", 4, 5), ("b", 3, 5))
    run_to_end(engine)
    out, back = engine.tracer.records[2], engine.tracer.records[5]
    assert (out.waiting, out.swapped) == (["b"], [])
    assert events(out) == [("free", "b", [1])]
    assert [(row.phase, row.start, row.num_new_tokens) for row in back.batch] == [("prefill", 0, 5)]
    assert (back.num_prefill_tokens, back.resumed) == (5, ["b"])


def test_a_fork_in_the_trace():
    engine = traced_engine()
    (prompt,) = random_prompts([6])
    engine.add_request(prompt, greedy(2, n=3), "a")
    run_to_end(engine)
    first, second = engine.tracer.records
    assert first.admitted == ["a", "a/1", "a/2"]
    assert first.running == ["a", "a/1", "a/2"]
    assert [row.request_id for row in first.batch] == ["a"]
    shared = [("share", "a/1", [0, 1]), ("share", "a/2", [0, 1])]
    assert events(first) == [("alloc", "a", [0, 1]), *shared]
    copies = [("copy_on_write", "a", [1, 2]), ("copy_on_write", "a/1", [1, 3])]  # source, copy
    assert events(second)[:2] == copies
    assert [row.blocks for row in second.batch] == [[0, 2], [0, 3], [0, 1]]
    assert [finished["request_id"] for finished in second.finished] == ["a", "a/1", "a/2"]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_block_tables_can_be_rebuilt_from_the_events_alone(preemption):
    """Nothing happens to a block that the trace does not tell."""
    *_, engine = random_run(4, preemption)
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
        assert len({block for table in tables.values() for block in table}) == record.kv.used
    assert tables == {}
    swaps = {"swap_out", "swap_in"} if preemption == "swap" else set()
    assert seen == {"alloc", "free", "share", "copy_on_write"} | swaps


def replay(event: KVEvent, tables: dict[str, list[int]]) -> None:
    """Do to the tables what the event says."""
    name, blocks = event.request_id, event.blocks
    if event.type == "alloc":
        tables.setdefault(name, []).extend(blocks)
    elif event.type == "share":
        assert list(blocks) in tables.values()
        tables[name] = list(blocks)
    elif event.type == "copy_on_write":
        source, copy = blocks
        tables[name][tables[name].index(source)] = copy
    elif event.type == "free":
        assert tables.pop(name) == blocks
        others = {block for table in tables.values() for block in table}
        assert event.held == [block for block in blocks if block in others]
    elif event.type == "swap_out":
        assert tables[name] == blocks
    else:
        assert event.type == "swap_in"
        assert tables[name][: len(blocks)] == blocks


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_every_request_is_in_exactly_one_queue(preemption):
    for engine in random_run(5, preemption):
        record = engine.tracer.records[-1]
        queues = record.waiting + record.running + record.swapped
        assert len(queues) == len(set(queues))
        live = engine.driver.requests.values()
        forks = engine.scheduler.completions.forks
        not_yet_forked = [fork for own in forks.values() for fork in own]
        expected = {c.request_id for c in live if not c.is_finished and c not in not_yet_forked}
        assert set(queues) == expected
        if record.preempted:
            assert not record.admitted + record.resumed


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_tokens_computed_again_are_no_useful_work(preemption):
    """The engine counts them, in the last step, too, and so do those who only have the trace."""
    *_, engine = random_run(4, preemption)
    stats = engine.stats()
    assert stats["recomputed_tokens"] > 0  # not all fit into host memory either
    computed = stats["prefill_tokens"] + stats["decode_tokens"]
    assert stats["useful_share"] == (computed - stats["recomputed_tokens"]) / computed
    assert useful_share(engine.tracer.records) == stats["useful_share"]


@every_milestone
def test_a_core_keeps_nothing_of_who_has_ended_though_nobody_makes_outputs(package):
    """So it is on ranks that follow another, for days."""
    engine = make_engine(package)
    add(engine, ("a", 5, 3), ("b", 9, 40))
    core, log = engine.core, engine.step_log
    for _ in range(8):
        core.step()
        log.close_steps()
    assert set(log._once_computed) == {"b"}
    core.finish_request(engine.requests["b"], "abort")
    log.close_steps()
    assert not log._once_computed
