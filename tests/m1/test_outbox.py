"""Outputs on their way: the newest of each request, to whom it belongs, once, in any thread."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

import m1_single
from engine_helpers import greedy, make_engine, make_request
from milestone_llm.engine import intake
from milestone_llm.frontend.output_queue import Outbox, Reader
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.core.outputs import SampledToken


@pytest.fixture
def restless():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def output_of(name: str, num_tokens: int = 0) -> RequestOutput:
    request = make_request(name, max_tokens=9)
    for _ in range(num_tokens):
        request.append_token(SampledToken(5))
    return RequestOutput.from_request(request)


def test_the_newest_output_of_a_request_replaces_the_ones_before():
    outbox = Outbox()
    for num_tokens in (1, 2):
        for name in "ab":
            outbox.put(output_of(name, num_tokens), None)
    assert [(o.request_id, len(o.token_ids)) for o in outbox.take(None)] == [("a", 2), ("b", 2)]
    assert outbox.take(None) == []


def test_each_reader_gets_its_own_and_leaves_those_of_others():
    outbox, readers = Outbox(), [None, Reader(wants_all=True), Reader(wants_all=True)]
    for name, reader in zip("abc", readers, strict=True):
        outbox.put(output_of(name), reader)
    for name, reader in zip("abc", readers, strict=True):
        assert outbox.has(reader)
        assert outbox.holds(name)
        assert [output.request_id for output in outbox.take(reader)] == [name]
        assert not outbox.has(reader)
        assert not outbox.holds(name)


def test_a_reader_that_only_waits_for_the_end_is_kept_nothing():
    outbox, reader = Outbox(), Reader(wants_all=False)
    outbox.put(output_of("a"), reader)
    assert not outbox.has(reader)
    assert not outbox.holds("a")


def test_no_output_is_lost_or_given_twice_while_threads_put_and_take(restless):
    outbox, taken, errors = Outbox(), [], []
    output, names = output_of("a"), [f"q{number}" for number in range(3000)]
    is_done, start = threading.Event(), threading.Barrier(4)

    def guarded(work: Any) -> None:
        start.wait()
        try:
            work()
        except Exception as error:
            errors.append(error)

    def take() -> None:
        while not is_done.is_set() or outbox.has(None):
            taken.extend(each.request_id for each in outbox.take(None))

    def ask() -> None:
        while not is_done.is_set():
            outbox.holds("never heard of")

    def put() -> None:
        for name in names:
            outbox.put(RequestOutput(name, [], output.outputs, output.metrics), None)
            outbox.put(output, Reader(wants_all=True))
        is_done.set()

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (put, take, take, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(taken) == sorted(names)


def test_threads_that_add_at_once_get_different_ids_and_places(monkeypatch):
    """Making a request takes its time, in which another thread may make one too."""

    def slow(**fields: Any) -> Any:
        time.sleep(0.002)
        return request(**fields)

    request = intake.Request
    monkeypatch.setattr(intake, "Request", slow)
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
