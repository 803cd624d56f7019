"""Kernels under Triton's interpreter: ours, and those of the exercises.

Each against its twin on the CPU, and ours in an engine as well, all in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON

ROOT = Path(__file__).parents[2]
EXERCISES = ("test_m5_paged_decode.py", "test_build_triton.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_interpreted_kernels_equal_their_twins(kernel_tests: list[str]) -> None:
    kernel = (ROOT / "exercises" / "m5_paged_decode.py").read_text(encoding="utf-8")
    is_begun = "raise NotImplementedError" not in kernel
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *([] if is_begun else ["-k", "not yours"]),
            *kernel_tests,
            *(f"tests/exercises/{name}" for name in EXERCISES),
        ],
        env={"KERNEL_SEED": "0", **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
    assert f"right sequences: yours {'' if is_begun else '-, before'}" in run.stdout
