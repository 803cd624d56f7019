"""The loop around an engine that fails: it goes on until three failures come in a row."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.engines import assert_empty, every_milestone, make_engine, run_to_end
from helpers.servers import messages_of, wait_for
from milestone_llm.core.engine_core import EngineCore
from milestone_llm.core.outputs import EngineCoreOutput, RequestFacts
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.engine_driver import EngineDriver
from milestone_llm.frontend.input_processor import InputProcessor
from milestone_llm.frontend.step_log import StepLog
from milestone_llm.serving.engine.client import EngineCoreOutputs, EngineDeadError, EngineRequest
from milestone_llm.serving.engine.loop import MAX_FAILURES, EngineLoop


class FakeCore(EngineCore):
    """Has requests and computes nothing. Each call of a method takes the next of its errors."""

    def __init__(self, **errors: list[Exception | None]) -> None:
        self.errors = errors
        self.requests: list[str] = []
        self.calls: list[str] = []
        self.when_stepped: Any = lambda: []
        scheduler: Any = SimpleNamespace(
            kv_usage=lambda: SimpleNamespace(total=0),
            waiting=[],
            has_unfinished_requests=lambda: bool(self.requests),
        )
        super().__init__(scheduler, runner=None)  # type: ignore[arg-type]

    def _fail(self, method: str) -> None:
        errors = self.errors.get(method)
        if errors and (error := errors.pop(0)) is not None:
            raise error

    def add_request(self, *requests: Request) -> None:
        (request,) = requests
        self.calls.append(f"add {request.request_id}")
        self._fail("add_request")
        self.requests.append(request.request_id)

    def finish_request(self, request: Request, reason: str) -> None:
        self.calls.append(f"{reason} {request.request_id}")
        self._fail("finish_request")
        request.finish(reason)
        self.requests.remove(request.request_id)

    def step(self) -> None:
        self.calls.append("step")
        outputs = self.when_stepped()
        self._fail("step")
        self._outputs += outputs or []

    def restart(self, requests: Iterable[Request]) -> None:
        self.requests = [each.request_id for each in requests]
        self.calls.append("restart")


class FakeEngine:
    """An engine around such a core."""

    model_name, max_model_len, tokenizer = "fake", 64, None
    vocab_size, eos_token_ids = 64, frozenset[int]()
    model = SimpleNamespace(device=SimpleNamespace(type="meta"))
    config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)

    def __init__(self, **errors: list[Exception | None]) -> None:
        self.core = FakeCore(**errors)
        self.scheduler = self.core.scheduler
        self.step_log = StepLog("fake", self.scheduler)
        self.driver = EngineDriver(self.core, self.step_log)
        parts = None, self.vocab_size, self.max_model_len, self.eos_token_ids, 0
        self.input_processor = InputProcessor(*parts, lambda name: False, lambda request: None)

    def stats(self) -> dict[str, Any]:
        return {}


def play(engine: FakeEngine, *rounds: Any) -> list[EngineCoreOutputs]:
    """Run the loop; in each step the next round is called with it, and after the last it stops."""
    loop, delivered, left = EngineLoop(engine), [], list(rounds)  # type: ignore[arg-type]
    engine.core.when_stepped = lambda: left.pop(0)(loop) if left else loop.stop()
    loop.add_requests([request("a"), request("b")])
    loop.run(delivered.append)
    return delivered


def request(name: str, **params: Any) -> EngineRequest:
    return EngineRequest(name, [3], SamplingParams(**params))


def test_an_abort_that_fails_is_one_failure_and_the_request_is_gone():
    engine = FakeEngine(finish_request=[RuntimeError("half way")])
    play(engine, lambda loop: loop.abort("a"), lambda loop: None)
    assert engine.core.calls[2:6] == ["step", "abort a", "restart", "step"]
    assert engine.core.requests == []
    assert "abort a" not in engine.core.calls[4:]


def test_an_abort_is_no_failure_where_the_step_in_flight_fails():
    """As that of the last client does: no request waits for that step any more."""
    engine = FakeEngine()
    finish = engine.core.finish_request

    def finish_and_settle(request: Request, reason: str) -> None:
        finish(request, reason)
        if not engine.core.requests:
            raise RuntimeError("of a step in flight")

    engine.core.finish_request = finish_and_settle  # type: ignore[method-assign]

    def abort(loop: EngineLoop) -> None:
        for name in "ab":
            loop.abort(name)
        loop.add_requests([request("c")])

    play(engine, abort)
    calls = ["abort a", "abort b", "restart", "add c", "step", "abort c", "restart"]
    assert engine.core.calls[3:] == calls


@pytest.mark.parametrize("method", ["step", "finish_request", "add_request"])
def test_three_failures_in_a_row_are_the_end_whatever_failed(method):
    errors: list[Exception | None] = [RuntimeError(str(number)) for number in range(9)]
    if method == "add_request":
        errors.insert(0, None)  # "a" is taken
    engine = FakeEngine(**{method: errors})

    names = iter("cdefghijkl")

    def act(loop: EngineLoop) -> None:
        if method == "finish_request":
            loop.abort(engine.core.requests[0])
        loop.add_requests([request(next(names))])

    with pytest.raises(EngineDeadError, match="RuntimeError\\('2'\\)"):
        play(engine, *[act] * 9)
    assert len(errors) == 9 - MAX_FAILURES


def test_a_step_that_works_makes_failures_forgotten():
    error = RuntimeError("now and then")
    engine = FakeEngine(step=[error, error, None, error, error, None])

    def count(loop: EngineLoop) -> None:
        engine.step_log.counts["steps"] += 1

    play(engine, *[count] * 6)
    assert engine.core.calls.count("step") == 7


def test_who_could_not_be_added_is_told():
    engine = FakeEngine(add_request=[None, RuntimeError("no memory")])
    (message,) = play(engine)
    assert message.refusals["b"].status == 500
    assert "RuntimeError" in message.refusals["b"].text


def test_others_pass_while_a_grammar_is_compiled():
    """New requests and aborts do not wait for it. Who is aborted meanwhile is never added."""
    engine, may_end = FakeEngine(), threading.Event()

    def rule_of(params: SamplingParams) -> None:
        if threading.current_thread().name.startswith("grammars"):
            assert params.structured_outputs
            assert may_end.wait(60)

    engine.input_processor.grammars = SimpleNamespace(rule_of=rule_of)  # type: ignore[assignment]
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
        lambda loop: None,
    )
    calls = [call for call in engine.core.calls if call != "step"]
    assert calls[:5] == ["add a", "add b", "add c", "abort a", "add r"]
    assert "add left" not in calls


def test_a_step_is_one_message_of_token_ids():
    engine = FakeEngine()

    def tokens(loop: EngineLoop) -> list[EngineCoreOutput]:
        facts = RequestFacts(num_cached_tokens=3)
        return [EngineCoreOutput("a", [7], facts=facts), EngineCoreOutput("b", [8], facts=facts)]

    def last(loop: EngineLoop) -> list[EngineCoreOutput]:
        return [EngineCoreOutput("a", [9]), EngineCoreOutput("b", [3, 4], [], "length")]

    first, second = play(engine, tokens, last)
    assert (first.request_ids, first.token_ids, first.others) == (["a", "b"], [7, 8], [])
    assert list(first.facts) == ["a", "b"]
    assert [output.facts.num_cached_tokens for output in first.outputs() if output.facts] == [3, 3]
    assert (second.request_ids, second.token_ids, second.facts) == (["a"], [9], {})
    assert [output.finish_reason for output in second.others] == ["length"]


def test_tokens_that_a_failure_has_kept_back_come_after_it():
    """The core has handed them to the request; the step that was to bring them has failed."""
    engine = FakeEngine(step=[None, RuntimeError("later in the step"), None])
    requests: list[Request] = []
    add = engine.core.add_request
    engine.core.add_request = lambda each: (requests.append(each), add(each))  # type: ignore

    def sample(*token_ids: int) -> Any:
        def sampled(loop: EngineLoop) -> list[EngineCoreOutput]:
            requests[0].token_ids += token_ids
            return [EngineCoreOutput("a", list(token_ids))]

        return sampled

    messages = play(engine, sample(7), sample(8, 9), sample(10))
    outputs = [output for message in messages for output in message.outputs()]
    assert [output.new_token_ids for output in outputs] == [[7], [8, 9], [10]]


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
