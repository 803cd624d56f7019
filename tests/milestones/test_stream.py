"""Streams: every token is seen, and a stream that is left early leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import m1_single
from helpers.engines import (
    assert_empty,
    every_milestone,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
)

PROMPTS = random_prompts([6, 3, 9, 4], seed=4)
EXPECTED = [hf_greedy("llama", prompt, 8) for prompt in PROMPTS]


@every_milestone
def test_abort_inside_a_stream_ends_that_request_only(package):
    engine = make_engine(package)
    last = {}
    for output in engine.stream(PROMPTS[:2], greedy(8)):
        last[output.request_id] = output
        if output.request_id == "r0" and len(output.token_ids) == 3:
            assert engine.abort("r0").finish_reason == "abort"
    assert last["r0"].token_ids == EXPECTED[0][:3]
    assert last["r1"].token_ids == EXPECTED[1]
    assert_empty(engine)


@every_milestone
def test_a_stream_forgotten_in_the_middle_of_a_step_ends_with_the_next(package, monkeypatch):
    """The garbage collector may close an iterator anywhere."""
    engine = make_engine(package)
    streams = [engine.stream(PROMPTS[0], greedy(8))]
    engine.add_request(PROMPTS[1], greedy(8), request_id="b")
    launch = engine.runner.launch

    def forgetful(plan: Any) -> Any:
        if streams:
            streams.clear()
            gc.collect()
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", forgetful)
    assert list(run_to_end(engine)) == ["b"]
    assert engine.stats()["decode_tokens"] < 2 * 7, "one of the two went no further"
    assert engine.stats()["finished"] == 2
    assert engine.add_request(PROMPTS[2], greedy(8), request_id="r0"), "its id is free again"
    assert run_to_end(engine)["r0"].token_ids == EXPECTED[2]
    assert_empty(engine)


@every_milestone
def test_threads_may_share_an_engine(package):
    """Each steps for all until it has its own outputs."""
    engine = make_engine(package, max_num_seqs=3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        with ThreadPoolExecutor(6) as threads:
            work = [threads.submit(engine.generate, PROMPTS[n % 4], greedy(8)) for n in range(12)]
            tokens = [outputs[0].token_ids for outputs in (each.result() for each in work)]
    finally:
        sys.setswitchinterval(interval)
    assert tokens == EXPECTED * 3
    assert_empty(engine)


@every_milestone
def test_two_streams_read_in_turn_both_see_every_token(package):
    """What came while the other was read comes in one piece: an output is the newest there is."""
    engine = make_engine(package)
    streams = [engine.stream(prompt, greedy(8)) for prompt in PROMPTS[:2]]
    seen: list[list[list[int]]] = [[], []]
    for outputs in itertools.zip_longest(*streams):
        for snapshots, output in zip(seen, outputs, strict=True):
            if output is not None:
                snapshots.append(output.token_ids)
    for snapshots, tokens in zip(seen, EXPECTED, strict=False):
        lengths = [len(snapshot) for snapshot in snapshots]
        assert lengths == sorted(set(lengths)), "each has grown"
        assert len(lengths) > 2
        assert snapshots == [tokens[:length] for length in lengths]
        assert snapshots[-1] == tokens
    assert_empty(engine)


@every_milestone
def test_an_id_is_taken_until_its_last_output_has_been_given_out(package):
    engine = make_engine(package)
    engine.add_request(PROMPTS[0], greedy(2), request_id="mine")
    engine.generate(PROMPTS[1], greedy(8))  # `mine` ends meanwhile
    assert engine.has_unfinished_requests()
    with pytest.raises(ValueError, match=r"'mine'.*has not been taken yet"):
        engine.add_request(PROMPTS[2], greedy(2), request_id="mine")
    assert [output.token_ids for output in engine.step()] == [EXPECTED[0][:2]]
    assert not engine.has_unfinished_requests()
    engine.add_request(PROMPTS[2], greedy(2), request_id="mine")
    assert run_to_end(engine)["mine"].token_ids == EXPECTED[2][:2]


def test_a_generate_does_not_look_through_what_was_there_before(monkeypatch):
    engine = make_engine(m1_single)
    launch, before, seen = engine.runner.launch, gc.get_threshold(), []
    monkeypatch.setattr(
        engine.runner, "launch", lambda plan: (seen.append(gc.get_threshold()[2]), launch(plan))[1]
    )
    engine.generate([[3, 4, 5]], greedy(2))
    assert min(seen) > 10**9
    assert gc.get_threshold() == before
    assert before[2] < 10**9


def test_what_is_new_before_a_generate_is_still_new_behind_it():
    """If it were old, a program that generates again and again would keep all its garbage."""
    gc.unfreeze()  # nothing is frozen, as in a program that has just begun
    gc.disable()
    try:
        engine = make_engine(m1_single)
        garbage: list[Any] = [engine]
        garbage.append(garbage)
        found = weakref.ref(engine)
        del garbage, engine
        make_engine(m1_single).generate([[3, 4, 5]], greedy(2))
        gc.collect(1)
        assert found() is None
    finally:
        gc.enable()
        gc.freeze()
