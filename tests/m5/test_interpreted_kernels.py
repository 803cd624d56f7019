"""Kernels under Triton's interpreter: ours, and those of the course.

Each against its twin on the CPU, and ours in an engine as well, all in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m5_kernels.kernels.triton_or_twin import HAS_TRITON

ROOT = Path(__file__).parents[2]
TRITON_COURSE = "tests/exercises/test_build_triton.py"

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]


@pytest.mark.slow
def test_interpreted_kernels_of_extras_equal_their_twins(kernel_tests: list[str]) -> None:
    interpreted(*(tests for tests in kernel_tests if "extras" in tests))
    interpreted("-m", "slow", "tests/m5/kernels")


def test_interpreted_kernels_equal_their_twins_and_serve_an_engine() -> None:
    interpreted("-m", "not slow", "tests/m5/kernels", TRITON_COURSE)


def interpreted(*arguments: str) -> None:
    """Tests pass under the interpreter."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        env={"KERNEL_SEED": "0", **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
