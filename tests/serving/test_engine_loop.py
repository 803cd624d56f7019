"""The loop around an engine that fails: it goes on until three failures come in a row."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.engines import assert_empty, every_milestone, make_engine, run_to_end
from helpers.servers import messages_of, wait_for
from m2_batching import EngineConfig
from m2_batching.scheduler import Scheduler
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.engine_driver import EngineDriver
from milestone_llm.frontend.input_processor import InputProcessor
from milestone_llm.frontend.step_log import StepLog
from milestone_llm.lab.playground.simulate import RuleRunner
from milestone_llm.serving.engine.client import EngineCoreOutputs, EngineDeadError, EngineRequest
from milestone_llm.serving.engine.loop import MAX_FAILURES, EngineLoop


class FailingScheduler(Scheduler):
    """M2's scheduler. A call of a method takes the next of its errors; None: it does its work."""

    def __init__(self, errors: dict[str, list[Exception | None]]) -> None:
        super().__init__(EngineConfig(max_num_seqs=8), max_model_len=64)
        self.errors = errors
        self.calls: list[str] = []
        self.when_stepped: Any = lambda: None
        self._is_restarting = False

    def _note(self, call: str, method: str) -> None:
        if not self._is_restarting:
            self.calls.append(call)
            self._fail(method)

    def _fail(self, method: str) -> None:
        errors = self.errors.get(method)
        if errors and (error := errors.pop(0)) is not None:
            raise error

    def add(self, *requests: Request) -> None:
        self._note(" ".join(["add", *(each.request_id for each in requests)]), "add")
        super().add(*requests)

    def finish(self, request: Request, reason: str) -> None:
        self._note(f"{reason} {request.request_id}", "finish")
        super().finish(request, reason)

    def schedule(self) -> StepPlan:
        self.calls.append("step")
        self.when_stepped()
        self._fail("schedule")
        return super().schedule()

    def update(self, plan: StepPlan, sampled: Any) -> list[EngineCoreOutput]:
        outputs = super().update(plan, sampled)
        self._fail("update")
        return outputs

    def restart(self, requests: Iterable[Request]) -> None:
        self.calls.append("restart")
        self._is_restarting = True
        super().restart(requests)
        self._is_restarting = False


class Engine:
    """An engine without a model around such a scheduler."""

    model_name, decoder_name, max_model_len, tokenizer = "none", "none", 64, None
    vocab_size, eos_token_ids = 64, frozenset[int]()
    config = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)

    def __init__(self, grammars: Any = None, **errors: list[Exception | None]) -> None:
        self.scheduler = FailingScheduler(errors)
        self.step_log = StepLog("m2_batching", self.scheduler)
        self.driver = EngineDriver(self.scheduler, RuleRunner(), self.step_log)
        parts = None, self.vocab_size, self.max_model_len, self.eos_token_ids, 0
        self.input_processor = InputProcessor(
            *parts, lambda name: False, lambda request: None, grammars=grammars
        )

    @property
    def calls(self) -> list[str]:
        return self.scheduler.calls


def play(engine: Engine, *rounds: Any, names: str = "ab", **params: Any) -> list[EngineCoreOutputs]:
    """Run the loop; in each step the next round is called with it, and after the last it stops."""
    loop, left = EngineLoop(engine), list(rounds)  # type: ignore[arg-type]
    delivered: list[EngineCoreOutputs] = []
    engine.scheduler.when_stepped = lambda: left.pop(0)(loop) if left else loop.stop()
    loop.add_requests([request(name, **params) for name in names])
    loop.run(delivered.append)
    return delivered


def request(name: str, **params: Any) -> EngineRequest:
    """Return a request, whose tokens will be 7, 8, ..."""
    return EngineRequest(name, [3] * 7, SamplingParams(**params))


def just_step(loop: EngineLoop) -> None:
    pass


def test_an_abort_that_fails_is_one_failure_and_the_request_is_gone():
    engine = Engine(finish=[RuntimeError("half way")])
    play(engine, lambda loop: loop.abort("a"), just_step)
    assert engine.calls[2:6] == ["step", "abort a", "restart", "step"]
    assert engine.driver.requests == {}
    assert "abort a" not in engine.calls[4:]


def test_an_abort_is_no_failure_where_the_step_in_flight_fails():
    """As that of the last client does: no request waits for that step any more."""
    engine = Engine()
    finish = engine.scheduler.finish

    def finish_and_settle(request: Request, reason: str) -> None:
        finish(request, reason)
        if not engine.scheduler.has_unfinished_requests():
            raise RuntimeError("of a step in flight")

    engine.scheduler.finish = finish_and_settle

    def abort(loop: EngineLoop) -> None:
        for name in "ab":
            loop.abort(name)
        loop.add_requests([request("c")])

    play(engine, abort)
    calls = ["abort a", "abort b", "restart", "add c", "step", "abort c", "restart"]
    assert engine.calls[3:] == calls


@pytest.mark.parametrize("method", ["schedule", "finish", "add"])
def test_three_failures_in_a_row_are_the_end_whatever_failed(method):
    errors: list[Exception | None] = [RuntimeError(str(number)) for number in range(9)]
    if method == "add":
        errors[:0] = [None] * 4  # those that are there from the start
    engine = Engine(**{method: errors})

    def act(loop: EngineLoop) -> None:
        for name in "abcd" if method == "finish" else "":
            loop.abort(name)
        loop.add_requests([request(name) for name in "efgh" if method == "add"])

    with pytest.raises(EngineDeadError, match="RuntimeError\\('2'\\)"):
        play(engine, *[act] * 9, names="abcd")
    assert len(errors) == 9 - MAX_FAILURES


def test_a_step_that_works_makes_failures_forgotten():
    error = RuntimeError("now and then")
    engine = Engine(schedule=[error, error, None, error, error, None])
    play(engine, *[just_step] * 6)
    assert engine.calls.count("step") == 7


def test_who_could_not_be_added_is_told():
    engine = Engine(add=[None, RuntimeError("no memory")])
    first, *_ = play(engine)
    assert first.refusals["b"].status == 500
    assert "RuntimeError" in first.refusals["b"].text


def test_others_pass_while_a_grammar_is_compiled():
    """New requests and aborts do not wait for it. Who is aborted meanwhile is never added."""
    may_end = threading.Event()

    def rule_of(params: SamplingParams) -> None:
        if threading.current_thread().name.startswith("grammars"):
            assert params.structured_outputs
            assert may_end.wait(60)

    engine = Engine(SimpleNamespace(rule_of=rule_of))
    ruled = [request(name, structured_outputs=object()) for name in ("r", "left")]

    def finish(loop: EngineLoop) -> None:
        may_end.set()
        wait_for(lambda: loop._orders.qsize() == 2)

    play(
        engine,
        lambda loop: loop.add_requests([*ruled, request("c")]),
        lambda loop: loop.abort("left"),
        lambda loop: loop.abort("a"),
        finish,
        just_step,
    )
    calls = [call for call in engine.calls if call != "step"]
    assert calls[:5] == ["add a", "add b", "add c", "abort a", "add r"]
    assert "add left" not in calls


def test_a_step_is_one_message_of_token_ids():
    engine = Engine()
    late = request("b", max_tokens=1)
    first, second = play(engine, lambda loop: loop.add_requests([late]), names="ac")
    assert (first.request_ids, first.token_ids, first.others) == (["a", "c"], [7, 7], [])
    assert list(first.facts) == ["a", "c"]
    assert (second.request_ids, second.token_ids) == (["a", "c"], [8, 8])
    assert second.facts == {}
    (last,) = second.others
    assert (last.request_id, last.new_token_ids, last.finish_reason) == ("b", [7], "length")
    assert last.facts is not None


def test_tokens_that_a_failure_has_kept_back_come_after_it():
    """The core has handed them to the request; the step that was to bring them has failed."""
    engine = Engine(update=[None, RuntimeError("later in the step"), None])
    messages = play(engine, just_step, just_step, names="a")
    outputs = [output for message in messages for output in message.outputs()]
    assert [output.new_token_ids for output in outputs] == [[7], [8], [9]]


@every_milestone
def test_generate_and_http_use_one_driver(package):
    """Each gets the outputs of its own requests, whoever steps."""
    engine = make_engine(package)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (wanted,) = engine.generate([[3, 4, 5]], params)
    engine.add_request([3, 4, 5], params, "mine")
    messages = messages_of(engine, params)
    outputs = [output for message in messages for output in message.outputs()]
    assert {output.request_id for output in outputs} == {"r"}
    assert [token for output in outputs for token in output.new_token_ids] == wanted.token_ids
    mine = run_to_end(engine)["mine"]
    assert mine.token_ids == wanted.token_ids
    assert engine.driver.requests == {}
    assert_empty(engine)
