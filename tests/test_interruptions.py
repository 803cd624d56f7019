"""Ctrl-C at any line of the engine: the step has happened or it has not, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from helpers.engines import (
    PACKAGES,
    assert_empty,
    break_at_call,
    every_milestone,
    greedy,
    make_engine,
    run_to_end,
    tiny_model,
    word_tokenizer,
)
from helpers.interrupter import Interrupter
from helpers.read_back import ReadBackRunner, right_output
from m1_single import RequestOutput, SamplingParams
from milestone_llm.core.errors import InputError
from milestone_llm.serving.timed import WaitingRunner

STRIDE = 1 if os.environ.get("STORM") else 193
"""Every how manieth line is interrupted; a prime, so that all lines of a loop come up."""
PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [12, 13], [5, 6, 7, 8, 9, 10, 20, 21, 22]]


def engine_of(package: Any, **fields: Any) -> Any:
    """An engine whose runner reads all KV back; memory for two and a half requests."""
    fields = {"max_num_seqs": 3, "max_model_len": 24, **fields}
    if package.__name__ >= "m3":
        fields |= {"block_size": 4, "kv_cache_tokens": 40}
    model = tiny_model(num_hidden_layers=1)
    runner = ReadBackRunner(fields.get("block_size"))
    return make_engine(package, model, tokenizer=word_tokenizer(), runner=runner, **fields)


def params_of(index: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=5 + 3 * index, stop=["w0 w0"])


EXPECTED = {
    f"q{index}": right_output(prompt, params_of(index), max_model_len=24)
    for index, prompt in enumerate(PROMPTS)
}


def submit(engine: Any) -> None:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params_of(index), request_id=f"q{index}")


def outcome(outputs: Iterable[RequestOutput]) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and reason of the requests that are done; their text has been checked."""
    done: dict[str, tuple[list[int], str | None]] = {}
    for output in outputs:
        if output.finished:
            shown = output.token_ids[: -1 if output.finish_reason == "stop" else None]
            assert output.text == word_tokenizer().decode(shown, skip_special_tokens=True)
            done[output.request_id] = (output.token_ids, output.finish_reason)
    return done


def num_lines_of(work: Callable[[], object]) -> int:
    """Lines that some work runs, the second time: what is done once is done."""
    work()
    return num_lines_of_once(work)


def num_lines_of_once(work: Callable[[], object]) -> int:
    """Lines that some work runs."""
    with Interrupter(at=-1) as counting:
        work()
    return counting.num_lines


@every_milestone
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(package):
    engine = engine_of(package)

    def work() -> dict[str, tuple[list[int], str | None]]:
        submit(engine)
        return outcome(run_to_end(engine).values())

    assert work() == EXPECTED
    num_interrupted = 0
    for at in range(1, num_lines_of(work) - 5, STRIDE):
        delivered: dict[str, tuple[list[int], str | None]] = {}
        interrupter = Interrupter(at)
        submit(engine)
        with contextlib.suppress(KeyboardInterrupt), interrupter:
            while engine.has_unfinished_requests():
                delivered |= outcome(engine.step())
        num_interrupted += bool(interrupter.where)
        engine.scheduler.check_invariants()
        delivered |= outcome(run_to_end(engine).values())
        # Nobody has an output whose text was being read.
        if not interrupter.where.startswith(("<lambda>", "text")):
            assert delivered.keys() == EXPECTED.keys(), interrupter.where
        for name, output in delivered.items():
            assert output == EXPECTED[name], interrupter.where
        assert_empty(engine)
    assert num_interrupted > 10


def test_an_interrupt_anywhere_in_the_driver_leaves_the_engine_to_other_threads():
    engine = engine_of(PACKAGES[0])
    for at in range(1, 40):
        submit(engine)
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at, ("engine_driver.py",)):
            engine.step()
        other = threading.Thread(target=run_to_end, args=(engine,), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), at
        assert not engine.has_unfinished_requests()


# --- requests come and go ------------------------------------------------------------------------

SHORT_STRIDE = 1 if os.environ.get("STORM") else 5
"""Every how manieth line of what is short."""


@every_milestone
def test_a_stream_whose_closing_is_interrupted_leaves_nothing_behind(package):
    engine = engine_of(package)

    def streaming() -> Any:
        outputs = engine.stream(PROMPTS, params_of(3))
        next(outputs)
        return outputs

    num_lines = num_lines_of_once(streaming().close)
    for at in range(1, num_lines, SHORT_STRIDE):
        outputs = streaming()
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at) as interrupter:
            outputs.close()
        del outputs  # it was not closed if the first line was interrupted
        engine.step()
        assert not engine.has_unfinished_requests(), interrupter.where
        assert engine.take_outputs() == []
        assert not engine.is_taken(f"r{engine.input_processor.num_arrivals - 1}")
        assert_empty(engine)


AFTER_IT_WAS_TAKEN = ("discard", "abort ")


@every_milestone
def test_the_output_of_an_interrupted_abort_comes_with_the_next_step(package):
    engine = engine_of(package)

    def submit_and_step() -> None:
        submit(engine)
        engine.step()

    submit_and_step()
    num_lines = num_lines_of_once(lambda: engine.abort("q0"))
    run_to_end(engine)
    for at in range(1, num_lines, SHORT_STRIDE):
        submit_and_step()
        returned = None
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at) as interrupter:
            returned = engine.abort("q0")
        delivered = outcome(run_to_end(engine).values())
        if returned is None and not interrupter.where.startswith(AFTER_IT_WAS_TAKEN):
            assert delivered.keys() == EXPECTED.keys(), interrupter.where
        for name, (token_ids, reason) in delivered.items():
            assert token_ids == EXPECTED[name][0][: len(token_ids)], interrupter.where
            assert (token_ids, reason) == EXPECTED[name] or (name, reason) == ("q0", "abort")
        assert_empty(engine)


def test_an_abort_does_not_raise_what_the_step_in_flight_raised():
    engine = engine_of(PACKAGES[-1], async_scheduling=True)
    engine.add_request(PROMPTS[0], params_of(3), request_id="a")
    engine.step()
    assert engine.core.in_flight
    engine.runner.raise_at["wait"] = RuntimeError("the device is gone")
    output = engine.abort("a")
    assert (output.request_id, output.finish_reason) == ("a", "abort")
    assert not engine.core.in_flight
    assert not engine.has_unfinished_requests()
    submit(engine)
    assert outcome(run_to_end(engine).values()) == EXPECTED
    assert_empty(engine)


def test_what_went_wrong_first_is_raised_where_the_restart_fails_as_well():
    engine, steps = engine_of(PACKAGES[0]), []

    def fail(name: str) -> None:
        steps.append(name)
        raise KeyError(name)

    engine.output_processor.repair = lambda: fail("restart")
    with pytest.raises(KeyError, match="change") as raised:
        engine.driver.run(fail, "change")
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="restart"):
        engine.driver.run(fail, "never")
    assert steps[:3] == ["change", "restart", "restart"]
    assert "never" not in steps
    del engine.output_processor.repair
    submit(engine)
    assert outcome(run_to_end(engine).values()) == EXPECTED


def test_an_input_error_in_the_middle_of_a_step_is_no_refusal(monkeypatch):
    """A scheduler may be the reader's own, and raise whatever it likes."""
    engine = engine_of(PACKAGES[0])
    submit(engine)
    with monkeypatch.context() as patch:
        break_at_call(patch, engine.scheduler, "update", {1}, InputError("half way"))
        with pytest.raises(InputError, match="half way"):
            engine.step()
    assert outcome(run_to_end(engine).values()) == EXPECTED


@every_milestone
def test_a_stream_that_is_thrown_away_during_a_restart_leaves_the_lock_alone(package, monkeypatch):
    engine, params = make_engine(package, max_num_seqs=1), greedy(20)
    engine.add_request([5, 6], params, "other")
    streams = [engine.stream([[3, 4]], params)]  # its request waits for the other one
    could_take: list[bool] = []

    class Watcher:
        def record(self, step: Any, scheduler: Any) -> None:
            streams.clear()
            take = lambda: could_take.append(engine.driver._lock.acquire(blocking=False))  # noqa: E731
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()

    engine.step_log.watch(Watcher())
    with monkeypatch.context() as patch:
        break_at_call(patch, engine.runner, "launch", {1}, OSError("the forward failed"))
        with pytest.raises(OSError, match="the forward failed"):
            engine.step()
    assert not streams
    assert could_take
    assert not any(could_take)
    run_to_end(engine)
    assert_empty(engine)


NUM_SIGNALS = 2_000 if os.environ.get("STORM") else 60


@pytest.mark.parametrize("package", [PACKAGES[0], PACKAGES[-1]], ids=lambda each: each.__name__)
def test_a_real_ctrl_c_at_any_time_loses_nothing(package):
    """SIGINT from a timer, at whatever byte code the main thread is then."""
    fields = {"async_scheduling": True} if package.__name__ >= "m5" else {}
    engine, rng = engine_of(package, **fields), random.Random(7)
    params = [params_of(index) for index in range(len(PROMPTS))]
    start = time.perf_counter()
    engine.generate(PROMPTS, params)
    seconds, num_raised = time.perf_counter() - start, 0
    for number in range(NUM_SIGNALS):
        engine.add_request(PROMPTS[0], params[0], request_id=f"other {number}")
        timer = threading.Timer(rng.random() * seconds, signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            engine.generate(PROMPTS, params)
            timer.join()
        except KeyboardInterrupt:
            num_raised += 1
        timer.join()
        assert engine.requests.keys() <= {f"other {number}"}
        is_free = []  # another thread can have the engine
        other = threading.Thread(target=lambda: is_free.append(engine.abort("unknown")))  # noqa: B023
        other.start()
        other.join(timeout=60)
        assert is_free == [None]
        came = outcome(run_to_end(engine).values())
        assert came == {f"other {number}": EXPECTED["q0"]}
        assert_empty(engine)
    assert num_raised > NUM_SIGNALS // 2
    outputs = engine.generate(PROMPTS, params)
    assert [(each.token_ids, each.finish_reason) for each in outputs] == list(EXPECTED.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_forked_in_the_middle_of_another_threads_step_goes_on():
    """The thread that had the engine's lock is not there; its step is computed anew."""
    engine = make_engine(PACKAGES[0], runner=WaitingRunner(50), max_model_len=32)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request([1, 2], params, "first")
    thread = threading.Thread(target=engine.step)
    thread.start()
    while not engine.core.computing:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        done = {output.request_id for output in run_to_end(engine).values()}
        os._exit(done != {"first"})
    thread.join()
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.03)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0
