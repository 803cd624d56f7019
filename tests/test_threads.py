"""Threads that wait for each other are noticed, and what to do is said once."""

from __future__ import annotations

import importlib
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import milestone_llm
from milestone_llm.models import threads
from milestone_llm.models.threads import FAR_SLOWER, IN_A_ROW, ThreadWatch

measured = threads.product_times
QUIET, BUSY = (10.0, 12.0), (50.0, 10.0)
"""Milliseconds with all threads, and with one."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How it is, and how often somebody has looked."""
    machine = SimpleNamespace(times=QUIET, num_looks=0, num_threads=2)

    def product_times() -> tuple[float, float]:
        machine.num_looks += 1
        return machine.times

    monkeypatch.setattr(threads, "product_times", product_times)
    monkeypatch.setattr(threads, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.num_threads)
    take = partial(setattr, machine, "num_threads")
    monkeypatch.setattr(torch, "set_num_threads", take)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return machine


@pytest.mark.parametrize(
    ("chosen", "num_threads", "advice", "milliseconds"),
    [(None, 1, "Going on with one (--threads N takes N).", BUSY[1]),
     ("2", 2, "Take --threads 1.", BUSY[0])],
)  # fmt: skip
def test_a_machine_that_is_busy_from_the_start_is_noticed_once_and_a_chosen_number_kept(
    machine, monkeypatch, chosen, num_threads, advice, milliseconds
):
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    machine.times, said = BUSY, []
    watch = ThreadWatch("cpu", said.append)
    for seconds in (0.1, *[1.0] * 10):
        watch.note_step(seconds, 1)
    assert machine.num_threads == num_threads
    assert len(said) == 1
    assert "5.0 times" in said[0]
    assert advice in said[0]
    assert watch.slowness == milliseconds / threads.QUIET_MILLISECONDS


@pytest.mark.parametrize("may_change", [False, True])
def test_steps_far_slower_than_others_like_them_make_it_look_again(machine, may_change):
    said: list[str] = []
    watch = ThreadWatch("cpu", said.append, may_change=may_change)
    machine.times = BUSY
    for seconds in (0.1, 0.2, *[0.1 * FAR_SLOWER * 1.01] * (IN_A_ROW - 1)):
        watch.note_step(seconds, 8)
    assert (machine.num_looks, said) == (1, [])
    watch.note_step(0.1 * FAR_SLOWER * 1.01, 8)
    assert (machine.num_looks, len(said)) == (2, 1)
    assert machine.num_threads == (1 if may_change else 2)


@pytest.mark.parametrize(
    ("steps", "num_looks"),
    [
        ([(0.1, 8), *[(2.0, 8)] * IN_A_ROW], 2),  # it has looked, and threads are not to blame
        ([(0.1, 1), *[(2.0, 64)] * 5, (5.0, 1), (0.1, 1), (5.0, 1)], 1),  # larger, or slow once
    ],
)
def test_steps_that_are_slow_for_another_reason_are_not_blamed_on_threads(
    machine, steps, num_looks
):
    watch = ThreadWatch("cpu", pytest.fail)
    for seconds, num_outputs in steps:
        watch.note_step(seconds, num_outputs)
    assert machine.num_looks == num_looks


@pytest.mark.parametrize(("device", "num_threads"), [("cuda", 2), ("cpu", 1)])
def test_nobody_complains_where_no_threads_wait_for_each_other(machine, device, num_threads):
    machine.times, machine.num_threads = BUSY, num_threads
    watch = ThreadWatch(device, pytest.fail)
    for seconds in (0.1, *[2.0] * IN_A_ROW):
        watch.note_step(seconds, 1)


@pytest.mark.parametrize("policy", [None, "active"])
def test_threads_that_wait_are_told_to_sleep_unless_somebody_has_chosen(monkeypatch, policy):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    importlib.reload(milestone_llm)  # before torch: it imports nothing of the kind
    found = os.environ.pop("GOMP_SPINCOUNT", None)
    assert found == (None if policy else str(milestone_llm.NUM_SPINS))


def test_measuring_leaves_torch_its_threads():
    before = torch.get_num_threads()
    many, one = measured()
    assert min(many, one) > 0
    assert torch.get_num_threads() == before
