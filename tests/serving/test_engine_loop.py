"""The loop around an engine that fails: it goes on until three failures come in a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.serving.engine_client import EngineDeadError, EngineRequest
from milestone_llm.serving.engine_loop import MAX_FAILURES, EngineLoop


class FakeEngine:
    """Has requests and computes nothing. Each call of a method takes the next of its errors."""

    model_name, max_model_len, tokenizer = "fake", 64, None
    model = SimpleNamespace(device=SimpleNamespace(type="meta"))
    config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = SimpleNamespace(kv_usage=lambda: SimpleNamespace(total=0), waiting=[])

    def __init__(self, **errors: list[Exception | None]) -> None:
        self.errors = errors
        names = ("steps", "rows", "prefill_tokens", "decode_tokens", "padding_tokens")
        self.counts = dict.fromkeys((*names, "recomputed_tokens", "finished"), 0)
        self.requests: list[str] = []
        self.calls: list[str] = []
        self.when_stepped: Any = lambda: None

    def _fail(self, method: str) -> None:
        errors = self.errors.get(method)
        if errors and (error := errors.pop(0)) is not None:
            raise error

    def add_request(self, prompt: Any, params: Any, name: str, priority: int) -> None:
        self.calls.append(f"add {name}")
        self._fail("add_request")
        self.requests.append(name)

    def abort(self, name: str) -> None:
        self.calls.append(f"abort {name}")
        self._fail("abort")
        if name in self.requests:
            self.requests.remove(name)

    def step(self) -> list[Any]:
        self.calls.append("step")
        self.when_stepped()
        self._fail("step")
        return []

    def take_outputs(self) -> list[Any]:
        return []

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def stats(self) -> dict[str, Any]:
        return {}


def play(engine: FakeEngine, *rounds: Any) -> list[Any]:
    """Run the loop; in each step the next round is called with it, and after the last it stops."""
    loop, delivered, left = EngineLoop(engine), [], list(rounds)  # type: ignore[arg-type]
    engine.when_stepped = lambda: left.pop(0)(loop) if left else loop.stop()
    loop.add_requests([EngineRequest("a", [3], SamplingParams()), request("b")])
    loop.run(delivered.extend)
    return delivered


def request(name: str) -> EngineRequest:
    return EngineRequest(name, [3], SamplingParams())


def test_an_abort_that_fails_is_one_failure_and_is_tried_again():
    """As that of the last client does, where the step in flight is one that fails."""
    engine = FakeEngine(abort=[RuntimeError("of a step in flight")])
    play(engine, lambda loop: loop.abort("a"), lambda loop: None)
    assert engine.calls[2:6] == ["step", "abort a", "step", "abort a"]
    assert engine.requests == []


@pytest.mark.parametrize("method", ["step", "abort", "add_request"])
def test_three_failures_in_a_row_are_the_end_whatever_failed(method):
    errors: list[Exception | None] = [RuntimeError(str(number)) for number in range(9)]
    if method == "add_request":
        errors.insert(0, None)  # "a" is taken
    engine = FakeEngine(**{method: errors})
    with pytest.raises(EngineDeadError, match="RuntimeError\\('2'\\)"):
        play(engine, *[lambda loop: (loop.abort("nobody"), loop.add_requests([request("c")]))] * 9)
    assert len(errors) == 9 - MAX_FAILURES


def test_a_step_that_works_makes_failures_forgotten():
    error = RuntimeError("now and then")
    engine = FakeEngine(step=[error, error, None, error, error, None])

    def count(loop: EngineLoop) -> None:
        engine.counts["steps"] += 1

    play(engine, *[count] * 6)
    assert engine.calls.count("step") == 7


def test_who_could_not_be_added_is_told():
    engine = FakeEngine(add_request=[None, RuntimeError("no memory")])
    (refusal,) = play(engine)
    assert (refusal.request_id, refusal.status) == ("b", 500)
    assert "RuntimeError" in refusal.refusal


def test_figures_that_cannot_be_had_are_not_the_end():
    engine = FakeEngine()
    engine.stats = lambda: 1 / 0  # type: ignore[assignment,return-value]
    answers = []
    play(engine, lambda loop: answers.append(loop.report()), lambda loop: None)
    assert not answers[0].done()
