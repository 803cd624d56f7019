"""Steps launched before the tokens of the one before are known: late outputs, exact ends."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest

import m5_kernels
from m1_single import SamplingParams
from m5_kernels.scheduler import PLACEHOLDER
from milestone_llm.models.tiny_models import build_tiny_model

PROMPT = [5, 9, 33, 60, 7]


@functools.cache
def model() -> Any:
    return build_tiny_model("llama")


def make_engine(**fields: Any) -> Any:
    fields = {"max_num_seqs": 4, "max_model_len": 64, "check_invariants": True, **fields}
    return m5_kernels.LLMEngine(model(), trace="memory", **fields)


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})


@functools.cache
def alone(max_tokens: int = 8) -> list[int]:
    return make_engine(enforce_eager=True).generate([PROMPT], greedy(max_tokens))[0].token_ids


def test_tokens_come_one_step_after_their_step_was_launched() -> None:
    engine = make_engine()
    engine.add_request(PROMPT, greedy(3))
    seen = []
    while engine.has_unfinished_requests():
        seen.append([output.token_ids for output in engine.step()])
    expected = alone()[:3]
    assert seen == [[], [expected[:1]], [expected[:2]], [expected]]


def test_a_request_that_ends_by_length_has_no_row_too_many() -> None:
    engine = make_engine()
    engine.generate([PROMPT], greedy(5))
    assert [len(record.batch) for record in engine.tracer.records] == [1] * 5
    assert engine.stats()["padding_tokens"] == 0


def test_a_row_launched_for_a_request_that_had_stopped_is_padding() -> None:
    tokens = alone()
    engine = make_engine()
    stop = next(token for token in tokens if tokens.index(token) >= 2)
    output = engine.generate([PROMPT], greedy(8, stop_token_ids=[stop]))[0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert output.finish_reason == "stop"
    last = engine.tracer.records[-1]
    assert [(row.phase, row.sampled_token) for row in last.batch] == [("padding", None)]
    assert engine.stats()["kv"]["used"] == 0


def test_no_placeholder_is_seen_when_a_request_is_aborted_under_way() -> None:
    engine = make_engine()
    request_id = engine.add_request(PROMPT, greedy(8))
    engine.step()
    engine.step()
    assert engine.requests[request_id].token_ids[-1] == PLACEHOLDER
    output = engine.abort(request_id)
    assert output.token_ids == alone()[:1]
    again = engine.add_request(PROMPT, greedy(8), request_id=request_id)
    final = {}
    while engine.has_unfinished_requests():
        final.update({output.request_id: output for output in engine.step()})
    assert final[again].token_ids == alone()


def test_a_block_completed_by_a_token_under_way_is_found_later() -> None:
    engine = make_engine(block_size=4)
    tokens = PROMPT + alone(20)
    engine.generate([PROMPT], greedy(20))
    output = engine.generate([[*tokens[:24], 1]], greedy(2))[0]
    assert output.metrics.num_cached_tokens == 24


def test_logprobs_pause_the_pipeline_and_only_as_long_as_they_are_asked_for() -> None:
    engine = make_engine()
    engine.add_request(PROMPT, greedy(8))
    engine.step()
    assert engine._in_flight is not None
    engine.add_request(PROMPT, greedy(2, logprobs=1))
    engine.step()
    assert engine._in_flight is None
    final = {}
    while engine.has_unfinished_requests():
        final.update({output.request_id: output for output in engine.step()})
        if len(final) == 2 and final["r1"].finished and engine.has_unfinished_requests():
            assert engine.is_pipelined
    assert [final[name].token_ids for name in ("r0", "r1")] == [alone(), alone()[:2]]


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_step_that_raises_ends_its_requests_and_keeps_those_that_wait(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request(PROMPT, greedy(8))
    engine.add_request(PROMPT, greedy(8))
    for _ in range(3):
        engine.step()
    good = getattr(engine.runner, where)

    def bad(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, where, bad)
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    monkeypatch.setattr(engine.runner, where, good)
    final = {}
    while engine.has_unfinished_requests():
        final.update({output.request_id: output for output in engine.step()})
    assert final["r0"].finish_reason == "error"
    assert (final["r1"].token_ids, final["r1"].finish_reason) == (alone(), "length")
    assert engine.stats()["kv"]["used"] == 0
    assert not engine.runner.row_of


def test_a_preempted_request_keeps_the_token_that_was_under_way() -> None:
    engine = make_engine(max_num_seqs=3, block_size=4, kv_cache_tokens=64)
    outputs = engine.generate([PROMPT] * 3, greedy(40))
    assert engine.stats()["preemptions"] > 0
    assert [output.token_ids for output in outputs] == [alone(40)] * 3


def test_what_was_there_before_is_kept_from_the_garbage_collector_but_engines_are_not() -> None:
    engine = make_engine()
    assert gc.get_freeze_count() > 100_000
    engine.generate([PROMPT], greedy(3))
    seen = weakref.ref(engine)
    del engine
    gc.collect()
    assert seen() is None
