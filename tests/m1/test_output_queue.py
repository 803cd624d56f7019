"""Outputs on their way: the newest of each request, to whom it belongs, once, in any thread."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import m1_single
from engine_helpers import as_text, greedy, make_engine, word_tokenizer
from interrupter import Interrupter
from m1_single import RequestOutput, SamplingParams
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.core.request import Request
from milestone_llm.frontend import input_processor, output_processor
from milestone_llm.frontend.detokenizer import Detokenizer
from milestone_llm.frontend.output_processor import OutputProcessor
from milestone_llm.frontend.output_queue import OutputQueue


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def output_of(name: str, num_tokens: int = 0) -> RequestOutput:
    processor, queue = OutputProcessor(None), OutputQueue()
    processor.add([name], [0] * 4, SamplingParams(max_tokens=9), queue)
    processor.process([EngineCoreOutput(name, [5] * num_tokens)])
    return processor.states[name].snapshot()


# --- one reader's queue -------------------------------------------------------------------------


def test_the_newest_output_of_a_request_replaces_the_ones_before():
    queue = OutputQueue()
    for num_tokens in (1, 2):
        for name in "ab":
            queue.put(output_of(name, num_tokens))
    assert (len(queue), "a" in queue, "c" in queue) == (2, True, False)
    assert [(o.request_id, len(o.token_ids)) for o in queue.take()] == [("a", 2), ("b", 2)]
    assert (queue.take(), len(queue), "a" in queue) == ([], 0, False)


def test_a_reader_that_only_waits_for_the_end_is_kept_nothing():
    queue = OutputQueue(wants_all=False)
    queue.put(output_of("a"))
    assert len(queue) == 0
    assert "a" not in queue


def test_no_output_is_lost_where_taking_is_interrupted():
    for at in itertools.count(1):
        queue = OutputQueue()
        for name in "ab":
            queue.put(output_of(name))
        interrupter, taken = Interrupter(at), []
        with contextlib.suppress(KeyboardInterrupt), interrupter:
            taken = queue.take()
        if not interrupter.where:
            break
        assert [each.request_id for each in taken + queue.take()] == ["a", "b"], interrupter.where
    assert at > 3


def test_an_early_output_keeps_the_metrics_that_it_had():
    processor, queue = OutputProcessor(None), OutputQueue()
    processor.add(["a"], [3], SamplingParams(max_tokens=9), queue)
    processor.process([EngineCoreOutput("a", [5])])
    (early,) = queue.take()
    processor.process([EngineCoreOutput("a", [6, 7], [], "length")])
    (last,) = queue.take()
    assert (len(early.metrics.token_times), early.metrics.finish_time) == (1, None)
    assert len(last.metrics.token_times) == 3
    assert last.metrics.finish_time is not None


def test_no_output_is_lost_or_given_twice_while_threads_put_and_take(restless):
    queue, taken, errors = OutputQueue(), [], []
    output, names = output_of("a"), [f"q{number}" for number in range(3000)]
    is_done, start = threading.Event(), threading.Barrier(4)

    def guarded(work: Any) -> None:
        start.wait()
        try:
            work()
        except Exception as error:
            errors.append(error)

    def take() -> None:
        while not is_done.is_set() or len(queue):
            taken.extend(each.request_id for each in queue.take())

    def ask() -> None:
        while not is_done.is_set():
            assert "never heard of" not in queue

    def put() -> None:
        for name in names:
            queue.put(RequestOutput(name, [], output.outputs, output.metrics))
        is_done.set()

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (put, take, take, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(taken) == sorted(names)


# --- from tokens to outputs ---------------------------------------------------------------------


class Following:
    """An output processor, and the ends that it has told of."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []
        self.processor = OutputProcessor(word_tokenizer())

    def add(self, name: str, queue: OutputQueue, **params: Any) -> None:
        """Follow a request of a prompt that does not matter."""
        self.processor.add([name], [3], SamplingParams(max_tokens=9, **params), queue)

    def process(self, name: str, *token_ids: int, reason: str | None = None) -> None:
        """Tokens of one request."""
        ended = self.processor.process([EngineCoreOutput(name, list(token_ids), [], reason)])
        self.ends += ended.items()


def test_each_reader_gets_its_own_and_leaves_those_of_others():
    following = Following()
    queues = {name: OutputQueue() for name in "abc"}
    for name, queue in queues.items():
        following.add(name, queue)
        following.process(name, 5, 6)
    for name, queue in queues.items():
        (output,) = queue.take()
        assert (output.request_id, output.text) == (name, as_text([5, 6]))
        assert queue.unfinished == {name}
        following.process(name, 7, reason="length")
        assert queue.unfinished == set()
        assert not following.processor.is_known(name)
    assert following.ends == [(name, "length") for name in "abc"]


def test_a_stop_string_ends_a_request_in_the_middle_of_its_new_tokens():
    following, queue = Following(), OutputQueue()
    following.add("a", queue, stop=["w6"])
    following.process("a", 5)
    assert following.ends == []
    following.process("a", 6, 7, 8)  # the core does not know that it has ended
    (output,) = queue.take()
    assert (output.token_ids, output.text.strip()) == ([5, 6], "w5")
    assert (output.finish_reason, following.ends) == ("stop", [("a", "stop")])
    following.process("a", 9)  # it is gone
    assert len(following.ends) == 1
    assert queue.take() == []


def test_after_an_interruption_the_processor_says_what_it_has_and_takes_the_rest():
    following, queue = Following(), OutputQueue()
    following.add("a", queue)
    following.process("a", 5)
    (state,) = following.processor.states.values()
    (completion,) = state.completions
    completion.token_times.append(0.0)  # of a token that was being taken in
    assert completion._detokenizer is not None
    completion._detokenizer.append(6, False)
    for _ in range(2):
        assert following.processor.repair() == {"a": 1}
    following.process("a", 6, 7, reason="length")
    (output,) = queue.take()
    assert (output.token_ids, output.text) == ([5, 6, 7], as_text([5, 6, 7]))
    assert len(output.metrics.token_times) == 3
    assert following.ends == [("a", "length")]
    assert following.processor.repair() == {}


def test_text_that_nobody_sees_grow_is_made_at_the_end_at_once(monkeypatch):
    following, calls = Following(), []
    decode = output_processor.decode_whole
    monkeypatch.setattr(output_processor, "Detokenizer", None)  # nothing is made token by token
    monkeypatch.setattr(
        output_processor, "decode_whole", lambda *given: calls.append(given) or decode(*given)
    )
    queue = OutputQueue(wants_all=False)
    following.add("a", queue)
    state = following.processor.states["a"]
    for token_id in range(5, 10):
        following.process("a", token_id)
    following.process("a", reason="length")
    assert calls == []
    assert state.snapshot().text == as_text(range(5, 10))
    assert len(calls) == 1


# --- several threads ----------------------------------------------------------------------------


def test_threads_that_add_at_once_get_different_ids_and_places(monkeypatch):
    """Making a request takes its time, in which another thread may make one too."""

    def slow(**fields: Any) -> Any:
        time.sleep(0.002)
        return Request(**fields)

    monkeypatch.setattr(input_processor, "Request", slow)
    engine, names = make_engine(m1_single), []
    threads = [
        threading.Thread(target=lambda: names.append(engine.add_request([5, 6], greedy(1))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == [f"r{number}" for number in range(8)]
    assert sorted(request.arrival for request in engine.requests.values()) == list(range(8))


# --- stop strings, of which the core does not know ----------------------------------------------


STOPPING = SamplingParams(max_tokens=9, ignore_eos=True, stop="w7")
"""Whoever has them wants to end with the word of token 7."""


@pytest.mark.parametrize("reason", [None, "length"])
def test_a_stop_string_is_the_reason_however_far_the_core_has_come(reason):
    """Two steps may be settled before their outputs are processed."""
    processor, queue = OutputProcessor(word_tokenizer()), OutputQueue()
    processor.add(["a"], [3, 4], STOPPING, queue)
    outputs = [EngineCoreOutput("a", [5, 7]), EngineCoreOutput("a", [8], [], reason)]
    assert processor.process(outputs) == {"a": "stop"}
    (output,) = queue.take()
    assert (output.token_ids, output.text.strip()) == ([5, 7], "w5")
    assert output.finish_reason == "stop"
    assert processor.states == {}


def test_a_stop_string_found_before_an_interruption_ends_the_request_after_it():
    processor, queue = OutputProcessor(word_tokenizer()), OutputQueue()
    processor.add(["a"], [3, 4], STOPPING, queue)
    (completion,) = processor.states["a"].completions
    finish, completion.finish = completion.finish, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        processor.process([EngineCoreOutput("a", [5, 7])])
    completion.finish = finish  # type: ignore[method-assign]
    assert processor.repair() == {"a": 2}
    assert processor.process([EngineCoreOutput("a")]) == {"a": "stop"}
    assert [output.token_ids for output in queue.take()] == [[5, 7]]


def test_a_completion_of_which_no_text_can_be_made_ends_alone_also_in_a_restart(monkeypatch):
    processor, queue, bad = OutputProcessor(word_tokenizer()), OutputQueue(), {7}
    append = Detokenizer._append

    def breaking(self: Detokenizer, token_id: int, look_for_stop: bool) -> bool:
        return bool(token_id in bad and 1 / 0) or append(self, token_id, look_for_stop)

    monkeypatch.setattr(Detokenizer, "_append", breaking)
    processor.add(["a", "a/1", "a/2"], [3, 4], SamplingParams(max_tokens=2), queue)
    names = {"a": [5, 7], "a/1": [6], "a/2": [8]}
    outputs = [EngineCoreOutput(*each) for each in names.items()]
    assert processor.process(outputs) == {"a": "error"}
    _, torn, _ = processor.states["a"].completions
    torn._detokenizer._num_begun += 1  # by Ctrl-C
    bad.add(6)
    assert processor.repair() == {"a": 1, "a/1": 1, "a/2": 1}
    outputs = [EngineCoreOutput(name) for name in names]
    assert processor.process(outputs) == {"a": "error", "a/1": "error"}
    assert processor.process([EngineCoreOutput("a/2", [9], [], "length")]) == {"a/2": "length"}
    (output,) = queue.take()
    assert [each.finish_reason for each in output.outputs] == ["error", "error", "length"]
    assert [each.text.strip() for each in output.outputs] == ["w5", "", "w8 w9"]


def interrupted(reason: str) -> None:
    """Ctrl-C at this very moment."""
    raise KeyboardInterrupt
