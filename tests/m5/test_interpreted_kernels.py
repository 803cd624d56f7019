"""Every kernel against its twin on the CPU: `tests/m5/kernels`, each file in its own process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from m5_kernels.kernels.backend import HAS_TRITON

FILES = sorted(pathlib.Path(__file__).parent.glob("kernels/test_*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.removeprefix("test_"))
def test_interpreted_kernel_equals_twin(path: pathlib.Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
