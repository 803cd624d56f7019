"""Threads that wait for each other are noticed, and what to do is said."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

import milestone_llm
from milestone_llm.models import threads
from milestone_llm.models.threads import settle_threads, slowness

measured = threads.product_times
QUIET, BUSY = (10.0, 12.0), (50.0, 10.0)
"""Milliseconds with all threads, and with one."""


@pytest.mark.parametrize(
    ("times", "num_threads", "chosen", "left", "advice"),
    [
        (BUSY, 2, None, 1, "5.0 times"),
        (BUSY, 2, "2", 2, "Take --threads 1."),
        (BUSY, 1, None, 1, ""),
        (QUIET, 2, None, 2, ""),
    ],
)
def test_threads_in_the_way_are_told_of_and_a_chosen_number_is_kept(
    times, num_threads, chosen, left, advice, monkeypatch
):
    said, taken = [], [num_threads]
    monkeypatch.setattr(threads, "product_times", lambda: times)
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    settle_threads(said.append)
    assert taken[-1] == left
    assert (len(said), advice in "".join(said)) == (bool(advice), True)
    assert slowness() == times[0] / threads.QUIET_MILLISECONDS


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
    torch.set_num_threads(2)
    try:
        many, one = measured()
        assert min(many, one) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
