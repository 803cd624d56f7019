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
@pytest.mark.parametrize("files", [ATTENTION, FILES - ATTENTION], ids=["attention", "others"])
def test_interpreted_kernels_equal_their_twins(files: set[pathlib.Path]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, sorted(files))]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
