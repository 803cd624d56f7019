"""Every kernel against its twin on the CPU, and all of them in an engine: `tests/m5/kernels`.

They run in a process of their own.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_interpreted_kernels_equal_their_twins() -> None:
    folder = pathlib.Path(__file__).parent / "kernels"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
