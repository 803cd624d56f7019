"""Where the tests of kernels run: `KERNEL_TESTS`.

With a GPU: on it, compiled. Without one: under triton's interpreter, which must be chosen before
anything imports triton - so not in this process, where other tests may have, and where the twins
are to be used, but in the processes that `test_interpreted_kernels.py` starts. To run one of them
directly: `TRITON_INTERPRET=1 pytest tests/m5/kernels/test_rms_norm.py`.

Inputs are new in each run of these tests, and a failure prints the `KERNEL_SEED` that repeats it.
`test_interpreted_kernels.py` sets one, so that `make test` does the same each time.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

KERNEL_TESTS = [
    "kernels",
    "extras/hopper",
    "extras/guesses/test_attention.py",
    "extras/guesses/test_guesses.py",
    "extras/int8/test_int8_linear.py",
]
"""Folders and files whose tests take a `device`."""
collect_ignore = [] if HAS_GPU or IS_INTERPRETED else KERNEL_TESTS


@pytest.fixture
def kernel_tests() -> list[str]:
    """`KERNEL_TESTS`, as pytest takes them at the root."""
    return [f"tests/m5/{name}" for name in KERNEL_TESTS]


@pytest.fixture
def device() -> str:
    """Where kernels run here, after seeding what draws their inputs."""
    assert HAS_GPU or IS_INTERPRETED, "its file belongs to KERNEL_TESTS: a twin equals itself"
    seed = int(os.environ.get("KERNEL_SEED", torch.seed() % 2**32))
    print(f"KERNEL_SEED={seed}")
    torch.manual_seed(seed)
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def nonsense_beside_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens for which attention computes nothing hold NaN."""

    def empty_like(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.full_like(tensor, torch.nan)

    monkeypatch.setattr(torch, "empty_like", empty_like)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is no number."""

    new_empty = torch.Tensor.new_empty

    def poisoned_empty(tensor: torch.Tensor, *shape: int, **options: Any) -> torch.Tensor:
        made = new_empty(tensor, *shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_empty)
