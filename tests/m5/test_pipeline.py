"""Steps launched before the tokens of the one before are known: late outputs, exact ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import m5_kernels
from helpers import engines
from helpers.engines import break_at_call, greedy, run_to_end
from helpers.read_back import ReadBackRunner
from helpers.schedulers import make_scheduler, request_of
from m5_kernels.kernels.launch import Launch
from m5_kernels.pipeline import Pipeline
from milestone_llm.core.engine_core import EngineCore
from milestone_llm.core.request import Request

PROMPT = [5, 9, 33, 60, 7]


def make_engine(**fields: Any) -> Any:
    fields = {"max_model_len": 64, "trace": "memory", "async_scheduling": True, **fields}
    return engines.make_engine(m5_kernels, **fields)


@functools.cache
def alone(max_tokens: int = 8) -> list[int]:
    return make_engine(enforce_eager=True).generate([PROMPT], greedy(max_tokens))[0].token_ids


@pytest.mark.parametrize(
    ("fields", "num_late"),
    [({}, 1), ({"enforce_eager": True}, 0), ({"async_scheduling": None}, 0)],  # here is a CPU
)
def test_tokens_come_one_step_after_their_step_was_launched(fields: Any, num_late: int) -> None:
    engine = make_engine(**fields)
    engine.add_request(PROMPT, greedy(3))
    seen = []
    while engine.has_unfinished_requests():
        seen.append([output.token_ids for output in engine.step()])
    assert seen == [[]] * num_late + [[alone()[:1]], [alone()[:2]], [alone()[:3]]]


def test_a_row_launched_for_a_request_that_had_stopped_is_padding() -> None:
    tokens = alone()
    engine = make_engine()
    stop = next(token for token in tokens if tokens.index(token) >= 2)
    output = engine.generate([PROMPT], greedy(8, stop_token_ids=[stop]))[0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert output.finish_reason == "stop"
    last = engine.tracer.records[-1]
    assert [(row.phase, row.sampled_token) for row in last.batch] == [("padding", None)]
    stats = engine.stats()
    assert (stats["padding_tokens"], stats["kv"]["used"]) == (1, 0)


def test_a_request_aborted_under_way_has_the_tokens_that_had_come_and_its_id_is_free_again() -> (
    None
):
    engine = make_engine()
    engine.add_request(PROMPT, greedy(20), "other")
    engine.add_request(PROMPT[::-1], greedy(20), "a")
    for _ in range(4):
        engine.step()
    request = engine.requests["a"]
    assert (request.num_output_tokens, request.num_in_flight) == (3, 1)
    assert engine.abort("a").token_ids == request.output_token_ids
    engine.add_request(PROMPT, greedy(8), "a")
    final = run_to_end(engine)
    assert (final["a"].token_ids, final["other"].token_ids) == (alone(), alone(20))


def test_aborting_the_last_request_leaves_nothing_under_way() -> None:
    engine = make_engine()
    request_id = engine.add_request(PROMPT, greedy(8))
    for _ in range(3):
        engine.step()
    engine.abort(request_id)
    assert engine.stats()["steps"] == len(engine.tracer.records) == 3, "the third is settled"
    assert (engine.step(), engine.stats()["steps"]) == ([], 3)


MANY_STOPS = {"min_tokens": 2, "stop_token_ids": list(range(3, 60, 3))}
MANY_BIASES = {"logit_bias": dict.fromkeys(range(17), -1.0)}


@pytest.mark.parametrize(
    ("special", "num_steps"), [({"n": 2}, 1), (MANY_STOPS, 2), (MANY_BIASES, 4)]
)
def test_what_the_host_must_sample_pauses_the_pipeline_as_long_as_it_must(
    special: Any, num_steps: int
) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, greedy(8), "r0")
    assert engine.step() == [], "its first token is under way"
    engine.add_request(PROMPT[:4], greedy(4, **special), "r1")
    for number in range(1, num_steps + 1):
        outputs = {output.request_id: output for output in engine.step()}
        assert len(outputs["r0"].token_ids) == number + 1, "nothing is late"
        assert {len(each.token_ids) for each in outputs["r1"].outputs} == {number}
    assert engine.step() == []
    assert all(request.num_in_flight for request in engine.requests.values()), "late again"
    assert run_to_end(engine)["r0"].token_ids == alone()


def test_penalties_and_logprobs_do_not_pause_the_pipeline() -> None:
    special: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "logprobs": 1}
    special |= {"min_tokens": 3, "logit_bias": dict.fromkeys(range(16), 1.0)}
    engine = make_engine()
    engine.add_request(PROMPT, greedy(8), "r0")
    engine.add_request(PROMPT[:4], greedy(4, **special), "r1")
    for _ in range(4):
        engine.step()
        assert len(engine.core.in_flight) == 1
        assert engine.requests["r1"].num_in_flight == 1
    assert run_to_end(engine)["r0"].token_ids == alone()


def test_log_probabilities_of_a_prompt_are_read_when_its_token_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, read = make_engine(), list[torch.dtype]()
    tolist = torch.Tensor.tolist

    def noted(self: torch.Tensor) -> Any:
        read.append(self.dtype)
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    engine.add_request(PROMPT, greedy(3, prompt_logprobs=2))
    engine.step()
    assert len(engine.core.in_flight) == 1
    assert torch.float64 not in read, "it would have waited for the device"
    (output,) = engine.step()
    assert torch.float64 in read
    assert [len(each) for each in output.prompt_logprobs[1:]] >= [2] * (len(PROMPT) - 1)


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_step_that_raises_ends_its_requests_and_keeps_those_that_wait(
    where: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=1)
    # A step launches its own plan, and waits for the one before.
    number = num_steps + 1 if where == "launch" else num_steps
    error = RuntimeError("the device is gone")
    break_at_call(monkeypatch, engine.runner, where, {number}, error)
    for name in ("r0", "r1"):
        engine.add_request(PROMPT, greedy(8), name)
    for _ in range(num_steps):
        engine.step()
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    assert not engine.runner.rows
    final = run_to_end(engine)
    assert final["r0"].finish_reason == "error"
    # A launch that fails leaves the step before as it was: its token is taken in.
    num_tokens = num_steps if where == "launch" else num_steps - 1
    assert final["r0"].token_ids == alone()[:num_tokens]
    assert (final["r1"].token_ids, final["r1"].finish_reason) == (alone(), "length")
    assert engine.stats()["kv"]["used"] == 0


def test_a_row_without_a_token_ends_its_request_and_its_next_row_is_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, greedy(8), "good")
    engine.add_request(PROMPT[::-1], greedy(8), "bad")
    for _ in range(3):
        engine.step()
    logits = engine.decoder.logits

    def spoilt(hidden: torch.Tensor, launch: Launch) -> torch.Tensor:
        found = logits(hidden, launch)
        found[1] = torch.nan
        return found

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "logits", spoilt)
        engine.step()
    final = run_to_end(engine)
    assert (final["good"].token_ids, final["good"].finish_reason) == (alone(), "length")
    assert (len(final["bad"].token_ids), final["bad"].finish_reason) == (3, "error")
    rows = [row for record in engine.tracer.records for row in record.batch]
    padding = [row.request_id for row in rows if row.phase == "padding"]
    assert padding == ["bad"]
    assert engine.stats()["kv"]["used"] == 0


def test_a_block_whose_last_token_was_in_flight_when_it_filled_up_is_found_later():
    """It has no name then: it gets one when its owner is preempted, or ends."""
    core = EngineCore(make_scheduler(3), ReadBackRunner(4))
    pipeline = Pipeline(core, lambda plan: True)
    kv, found = core.scheduler.kv, []
    allocate = kv.allocate
    kv.allocate = lambda *args: found.append(allocate(*args)) or found[-1]

    def run(*requests: Request) -> None:
        for request in requests:
            core.add_request(request)
        while core.scheduler.has_unfinished_requests():
            pipeline.step()

    run(request_of("a", [4, 5, 6], 3), b := request_of("b", [7, 8, 9], 6, arrival=1))
    assert (b.num_preemptions, found) == (1, [0, 0, 4])
    run(c := request_of("c", [3, 4, 5], 2))
    run(request_of("d", [*c.token_ids[:4], 9]))
    assert found == [0, 0, 4, 0, 4]
