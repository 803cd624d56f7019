"""The simulation asks all policies the same, and its router finds what it should."""

from __future__ import annotations

import argparse
from itertools import pairwise

import pytest

from docs.questions.scale_simulation import (
    ALL_CACHES,
    ONE_CACHE,
    Cache,
    Prompt,
    SimulatedReplica,
    main,
    prompts_of,
    simulate,
)


def args_of(**fields: int) -> argparse.Namespace:
    defaults = {"replicas": 8, "prompts": 4_000, "cache_tokens": 65_536, "stride": 8, "seed": 0}
    return argparse.Namespace(**{**defaults, **fields})


def asked(num_prompts: int, stride: int | None = 1, seed: int = 0) -> list[Prompt]:
    return list(prompts_of(4, num_prompts, stride, seed))


def prompt_of(session: int, num_own: int, now: float = 0.0, num_answer: int = 0) -> Prompt:
    return Prompt(now, session, 7, 40, 40 + num_own, num_answer, [])


def test_clients_ask_in_order_of_time_and_the_same_for_the_same_seed():
    prompts = asked(500)
    assert prompts == asked(500) != asked(500, seed=1)
    assert all(one.now <= other.now for one, other in pairwise(prompts))


def test_clients_ask_as_often_as_is_said():
    seconds = asked(5_000)[-1].now  # fewer at first, when all sessions are in their first turn
    assert seconds == pytest.approx(5_000 / (4 * 6), rel=0.2)


def test_a_turn_begins_with_all_of_the_turn_before():
    last: dict[int, Prompt] = {}
    for prompt in asked(500):
        assert len(prompt.names) == prompt.num_prompt // 16
        if before := last.get(prompt.session):
            assert prompt.names[: len(before.names)] == before.names
            assert prompt.system == before.system
            assert 16 <= prompt.num_prompt - before.num_prompt - before.num_answer <= 256
            assert prompt.now > before.now + before.num_answer * 0.01
        else:
            assert 16 <= prompt.num_prompt - prompt.num_system <= 256
        last[prompt.session] = prompt
    assert len({prompt.names[0] for prompt in last.values()}) < len(last)  # they are shared
    assert len({tuple(prompt.names) for prompt in last.values()}) == len(last)


def test_a_stride_names_fewer_blocks():
    lengths = [len(prompt.names) for prompt in asked(50)]
    assert [len(prompt.names) for prompt in asked(50, 8)] == [length // 8 for length in lengths]
    assert not any(prompt.names for prompt in asked(50, None))


def test_a_cache_finds_a_beginning_and_evicts_the_oldest_session():
    cache = Cache(120)
    assert cache.take(prompt_of(1, 30)) == 0
    assert cache.take(prompt_of(1, 40, num_answer=10)) == 70
    assert cache.take(prompt_of(2, 30)) == 40  # 40 + 50 + 30 tokens: full
    assert cache.take(prompt_of(1, 60)) == 90  # 130: the second goes
    assert cache.take(prompt_of(2, 10)) == 40
    assert cache.take(prompt_of(2, 60)) == 50  # the first goes
    assert cache.take(prompt_of(1, 5)) == 40


def test_a_replica_computes_what_is_not_cached_one_after_the_other():
    replica = SimulatedReplica(10_000)
    prompt = prompt_of(1, 1_960, now=5.0, num_answer=100)  # 0.02 s of work, but 1 s at least
    assert replica.serve(prompt) == (0, 5.1, pytest.approx(6.1))
    later = prompt_of(1, 2_160, now=5.0, num_answer=100)  # 100 tokens are new: 0.005 s
    assert replica.serve(later) == (2_100, pytest.approx(5.125), pytest.approx(6.125))


def test_the_router_finds_nearly_what_all_caches_in_one_engine_would():
    labels = ["prefix", "round-robin", "random", ALL_CACHES, ONE_CACHE]
    reports = simulate(labels, args_of())
    assert simulate([ALL_CACHES], args_of()) == {ALL_CACHES: reports[ALL_CACHES]}
    found = {label: report["hit_rate"] for label, report in reports.items()}
    assert found["prefix"] >= 0.9 * found[ALL_CACHES]
    assert found["prefix"] > 1.5 * max(found["round-robin"], found["random"])
    assert reports["prefix"]["sent_max"] <= 1.5
    assert reports["prefix"]["busy"] < reports["random"]["busy"]


@pytest.mark.parametrize("option", [["--cache-tokens", "5"], ["--stride", "1000"]])
def test_where_nothing_is_found_the_command_says_so(option, capsys):
    assert main(["--prompts", "50", *option]) == 0
    assert "no prefix is remembered" in capsys.readouterr().out


def test_the_command_prints_all_of_it(capsys):
    assert main(["--replicas", "2", "--prompts", "200"]) == 0
    printed = capsys.readouterr().out
    for words in ("prefix", "round-robin", "random", ALL_CACHES, ONE_CACHE, "bytes each"):
        assert words in printed
