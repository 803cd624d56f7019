"""Threads that wait for each other are noticed, and what to do is said."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from helpers.forked import ROOT
from milestone_llm.models import threads
from milestone_llm.models.threads import let_threads_sleep, settle_threads, slowness

measured = threads.product_times
OF_OPENMP = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
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
    said, taken = list[str](), [num_threads]
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
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": policy} if policy else {})
    let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == (None if policy else str(threads.NUM_SPINS))


WITHOUT_TORCH = """
import os, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, NoTorch())
from m2_batching.demo import main
main(sys.argv[1:])
"""


def test_a_program_tells_threads_to_sleep_before_it_imports_torch(tmp_path):
    """OpenMP reads it when torch is loaded."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "--out", str(tmp_path)]
    env = {key: value for key, value in os.environ.items() if key not in OF_OPENMP}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == f"{threads.NUM_SPINS}\n", done.stderr


def test_measuring_leaves_torch_its_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        many, one = measured()
        assert min(many, one) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
