"""The simulation asks all policies the same, and its router finds what it should."""

from __future__ import annotations

import argparse
from itertools import pairwise

import pytest

from milestone_llm.serving.router_simulation import (
    ALL_CACHES,
    ONE_CACHE,
    Cache,
    Clients,
    Session,
    SimulatedReplica,
    main,
    simulate,
)


def args_of(**fields: int) -> argparse.Namespace:
    defaults = {"replicas": 8, "prompts": 4_000, "cache_tokens": 65_536, "stride": 8, "seed": 0}
    return argparse.Namespace(**{**defaults, **fields})


def asked(num_prompts: int, stride: int = 1, seed: int = 0) -> list[tuple]:
    clients = Clients(4, stride, seed)
    return [
        (now, session.number, session.num_prompt, session.num_answer, tuple(session.names))
        for now, session in clients.prompts(num_prompts)
    ]


def session_of(*parts: tuple[int, int]) -> Session:
    num_prompt = sum(num_tokens for _, num_tokens in parts)
    return Session(1, list(parts), [], [], num_prompt, num_answer=0)


def test_clients_ask_in_order_of_time_and_the_same_for_the_same_seed():
    prompts = asked(500)
    assert prompts == asked(500) != asked(500, seed=1)
    assert all(one[0] <= other[0] for one, other in pairwise(prompts))


def test_clients_ask_as_often_as_is_said():
    seconds = asked(5_000)[-1][0]  # fewer at first, when all sessions are in their first turn
    assert seconds == pytest.approx(5_000 / (4 * 6), rel=0.2)


def test_a_turn_begins_with_all_of_the_turn_before():
    last: dict[int, tuple] = {}
    for _, number, num_prompt, _, names in asked(500):
        assert len(names) == num_prompt // 16
        if number in last:
            assert names[: len(last[number])] == last[number]
        last[number] = names
    assert len({names[0] for names in last.values()}) < len(last)  # system prompts are shared
    assert len(set(last.values())) == len(last)


def test_a_stride_names_fewer_blocks():
    assert [len(names) // 8 for *_, names in asked(50)] == [len(n) for *_, n in asked(50, 8)]


def test_a_cache_finds_a_beginning_and_evicts_the_oldest_end():
    cache = Cache(100)
    assert cache.take(session_of((1, 40), (2, 30))) == 0
    assert cache.take(session_of((1, 40), (2, 30), (3, 10))) == 70
    assert cache.take(session_of((1, 40), (4, 30))) == 40  # 110 tokens: the third part goes
    assert cache.take(session_of((1, 40), (2, 30), (3, 10))) == 70


def test_a_replica_computes_what_is_not_cached_one_after_the_other():
    replica = SimulatedReplica(10_000)
    session = session_of((1, 2_000))
    session.num_answer = 100  # 0.02 s of work, but no faster than 1 s
    assert replica.serve(5.0, session) == (0, 5.1, pytest.approx(6.1))
    assert replica.serve(5.0, session) == (2_000, pytest.approx(5.12), pytest.approx(6.12))


def test_the_router_finds_nearly_what_all_caches_in_one_engine_would():
    labels = ["prefix", "round-robin", "random", ALL_CACHES, ONE_CACHE]
    reports = simulate(labels, args_of())
    assert simulate([ALL_CACHES], args_of()) == {ALL_CACHES: reports[ALL_CACHES]}
    found = {label: report["hit_rate"] for label, report in reports.items()}
    assert found["prefix"] >= 0.9 * found[ALL_CACHES]
    assert found["prefix"] > 1.5 * max(found["round-robin"], found["random"])
    assert reports["prefix"]["sent_max"] <= 1.5
    assert reports["prefix"]["busy"] < reports["random"]["busy"]


def test_the_command_prints_all_of_it(capsys):
    assert main(["--replicas", "2", "--prompts", "200"]) == 0
    printed = capsys.readouterr().out
    for words in ("prefix", "round-robin", "random", ALL_CACHES, ONE_CACHE, "bytes each"):
        assert words in printed
