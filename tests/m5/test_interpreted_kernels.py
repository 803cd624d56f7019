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
GPU_PATH = "tests/m5/kernels/test_gpu_path.py"
TRITON_COURSE = "tests/exercises/test_build_triton.py"

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]


@pytest.mark.slow
def test_interpreted_kernels_of_extras_equal_their_twins(kernel_tests: list[str]) -> None:
    extras = [tests for tests in kernel_tests if "extras" in tests]
    interpreted(*extras)
    interpreted("-m", "slow", "tests/m5/kernels", f"--ignore={GPU_PATH}")


def test_interpreted_kernels_equal_their_twins(kernel_tests: list[str]) -> None:
    interpreted(
        "-m",
        "not slow",
        *(tests for tests in kernel_tests if "extras" not in tests),
        f"--ignore={GPU_PATH}",
        TRITON_COURSE,
    )


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_engine_takes_its_gpu_path(which: str) -> None:
    """On a device that stands in for a GPU; apart from the kernels, to be run beside them."""
    interpreted("-m", which, GPU_PATH)


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
