"""Every kernel against its twin on the CPU: `tests/m5/kernels`, in processes of their own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON

FILES = set(pathlib.Path(__file__).parent.glob("kernels/test_*.py"))
ATTENTION = {path for path in FILES if path.stem in ("test_flash_decode", "test_paged_prefill")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_interpreted_kernels_equal_their_twins() -> None:
    """Two processes at a time, on one core each."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    runs = [
        subprocess.Popen(
            [*command, *map(str, sorted(files))],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=pathlib.Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for files in (ATTENTION, FILES - ATTENTION)
    ]
    for run in runs:
        output, _ = run.communicate(timeout=600)
        assert run.returncode == 0, output[-6000:]
        assert " passed" in output
