"""Threads that wait for each other are noticed, and what to do is said once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from milestone_llm.lab import threads
from milestone_llm.lab.threads import FAR_SLOWER, IN_A_ROW, ThreadWatch

measured = threads.product_times
QUIET, BUSY = (10.0, 12.0), (50.0, 10.0)
"""Milliseconds with all threads, and with one."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How it is, and how often somebody has looked."""
    machine = SimpleNamespace(times=QUIET, num_looks=0)

    def product_times() -> tuple[float, float]:
        machine.num_looks += 1
        return machine.times

    monkeypatch.setattr(threads, "product_times", product_times)
    monkeypatch.setattr(threads, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return machine


def test_a_machine_that_is_busy_from_the_start_is_noticed_at_once(machine):
    machine.times, said = BUSY, []
    watch = ThreadWatch("cpu", said.append)
    assert "5.0 times" in said[0]
    assert "--threads 1" in said[0]
    for seconds in (0.1, *[1.0] * 10):
        watch.note_step(seconds, 1)
    assert len(said) == 1  # once is enough


def test_steps_far_slower_than_others_like_them_make_it_look_again(machine):
    said: list[str] = []
    watch = ThreadWatch("cpu", said.append)
    machine.times = BUSY
    for seconds in (0.1, 0.2, *[0.1 * FAR_SLOWER * 1.01] * (IN_A_ROW - 1)):
        watch.note_step(seconds, 8)
    assert (machine.num_looks, said) == (1, [])
    watch.note_step(0.1 * FAR_SLOWER * 1.01, 8)
    assert (machine.num_looks, len(said)) == (2, 1)


def test_steps_that_are_slow_for_another_reason_are_not_blamed_on_threads(machine):
    said: list[str] = []
    watch = ThreadWatch("cpu", said.append)
    for seconds in (0.1, *[2.0] * IN_A_ROW):
        watch.note_step(seconds, 8)
    assert (machine.num_looks, said) == (2, [])


def test_larger_steps_may_take_longer_and_one_slow_step_is_nothing(machine):
    watch = ThreadWatch("cpu", pytest.fail)
    for seconds, num_outputs in ((0.1, 1), *[(2.0, 64)] * 5, (5.0, 1), (0.1, 1), (5.0, 1)):
        watch.note_step(seconds, num_outputs)
    assert machine.num_looks == 1


@pytest.mark.parametrize(("device", "num_threads"), [("cuda", 2), ("cpu", 1)])
def test_nobody_looks_where_no_threads_compute(machine, monkeypatch, device, num_threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    machine.times = BUSY
    watch = ThreadWatch(device, pytest.fail)
    for seconds in (0.1, *[2.0] * IN_A_ROW):
        watch.note_step(seconds, 1)
    assert machine.num_looks == 0


def test_measuring_leaves_torch_its_threads():
    before = torch.get_num_threads()
    many, one = measured()
    assert min(many, one) > 0
    assert torch.get_num_threads() == before
