"""What an engine is owed is never more than HTTP has let in; to order something takes no time."""

from __future__ import annotations

import threading
from typing import Any

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.serving.engine.client import EngineRequest
from milestone_llm.serving.engine.orders import OrderingClient, Orders
from milestone_llm.serving.engine.process import EngineProcess
from serving_helpers import PATIENCE, wait_for


def request(name: str) -> EngineRequest:
    return EngineRequest(name, [3, 4, 5], SamplingParams())


def test_who_leaves_before_the_engine_knew_of_him_leaves_nothing_behind():
    client = OrderingClient()
    for number in range(1000):
        client.add_requests([request(f"r{number}")])
        client.abort(f"r{number}")
        client.report().cancel()
    orders = client.orders.take()
    assert (orders.requests, orders.aborts) == ({}, {})
    assert orders.wants_report
    assert client.orders.take(waits=False) == Orders()
    client.report()
    assert len(client._askers) == 1


def test_what_the_engine_has_is_aborted_before_anything_is_added():
    client = OrderingClient()
    client.add_requests([request("a"), request("b")])
    assert list(client.orders.take().requests) == ["a", "b"]
    client.add_requests([request("c"), request("d")])
    client.abort("b")
    client.abort("c")
    orders = client.orders.take()
    assert (list(orders.aborts), list(orders.requests)) == (["b"], ["d"])


def test_the_last_word_on_watching_counts():
    client = OrderingClient()
    seen: list[Any] = []
    client.watch(seen.append)
    client.watch(None)
    client.take_step("nobody sees this")  # type: ignore[arg-type]
    assert client.orders.take().watching is False
    client.watch(seen.append)
    client.take_step("step")  # type: ignore[arg-type]
    assert client.orders.take().watching is True
    assert seen == ["step"]


def test_everybody_who_asked_is_answered():
    client = OrderingClient()
    first, gone, last = client.report(), client.report(), client.report()
    gone.cancel()
    client.take_report(["figures"])  # type: ignore[list-item]
    assert first.result(0) == last.result(0) == ["figures"]
    client.take_report([])  # of an order that came too late to be taken with the others


def test_one_who_waits_for_orders_gets_them_from_another_thread():
    client = OrderingClient()
    timer = threading.Timer(0.05, client.stop)
    timer.start()
    assert client.orders.take().is_last
    timer.join()


class FullPipe:
    """One whose other end does not read."""

    def fileno(self) -> int:
        return -1  # there is nothing to hang up

    def __init__(self) -> None:
        self.is_read = threading.Event()
        self.is_full = threading.Event()
        self.sent: list[Orders] = []

    def send(self, orders: Orders) -> None:
        self.is_full.set()
        assert self.is_read.wait(PATIENCE)
        self.sent.append(orders)


def test_nobody_waits_for_an_engine_that_does_not_read():
    """Were they sent where they are made, this test would not come past the first one."""
    process = EngineProcess.__new__(EngineProcess)  # without the process
    OrderingClient.__init__(process)
    process._pipe = pipe = FullPipe()  # type: ignore[assignment]
    writer = threading.Thread(target=process._send_orders)
    writer.start()
    process.add_requests([request("first")])
    assert pipe.is_full.wait(PATIENCE)
    process.abort("first")
    for number in range(100):
        process.add_requests([request(f"r{number}")])
    pipe.is_read.set()
    wait_for(lambda: len(pipe.sent) == 2)
    process.orders.put(Orders(is_last=True))
    writer.join(PATIENCE)
    first, others = pipe.sent
    assert list(first.requests) == ["first"]
    assert (list(others.aborts), len(others.requests)) == (["first"], 100)
