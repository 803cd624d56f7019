"""Every kernel against its twin on the CPU: `tests/m5/kernels`, in processes of their own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON

FILES = sorted(pathlib.Path(__file__).parent.glob("kernels/test_*.py"))
ATTENTION = ("test_flash_decode", "test_paged_prefill")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("are_attention", [True, False], ids=["attention", "others"])
def test_interpreted_kernels_equal_their_twins(are_attention: bool) -> None:
    files = [str(path) for path in FILES if (path.stem in ATTENTION) == are_attention]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
