"""Where the tests of kernels run: `KERNEL_TESTS`.

With a GPU: on it, compiled. Without one: in triton's interpreter, which must be chosen before
anything imports triton. So it is not chosen in this process, where other tests may have imported
triton and the twins are used, but in processes that `test_interpreted_kernels.py` starts. To run
one of them directly: `TRITON_INTERPRET=1 pytest tests/m5/kernels/test_attention.py`.

Inputs are new in each run of these tests, and a failure prints the `KERNEL_SEED` that repeats it.
`test_interpreted_kernels.py` sets one, so that `make test` does the same each time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

KERNEL_TESTS = [
    "kernels",
    "extras/batch_invariant/test_invariant_kernels.py",
    "extras/devices/test_hopper_prefill.py",
    "extras/experts/test_expert_kernels.py",
    "extras/devices/test_write_to_host.py",
    "extras/families/test_family_kernels.py",
    "extras/quantization/test_fp8_kernels.py",
    "extras/spec_decode/test_verification_attention.py",
    "extras/spec_decode/test_draft_tokens.py",
]
"""Folders and files whose tests take a `device`."""
collect_ignore = [] if HAS_GPU or IS_INTERPRETED else KERNEL_TESTS


if IS_INTERPRETED:  # faster with what follows
    from triton import language as tl
    from triton.runtime import interpreter

    # It takes the place of `tl`'s functions once, and not in each call of a function.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    # There are few types, and each is looked up again and again.
    tl.pointer_type.__hash__ = tl.dtype.__hash__
    dtype_of = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: dtype_of(dtype.scalar)


@pytest.fixture
def kernel_tests() -> list[str]:
    """Return `KERNEL_TESTS` as paths from the root, for pytest."""
    return [f"tests/m5/{name}" for name in KERNEL_TESTS]


@pytest.fixture
def device() -> str:
    """Return the device of kernels, after seeding the generators of their inputs."""
    assert HAS_GPU or IS_INTERPRETED, "its file belongs to KERNEL_TESTS: a twin equals itself"
    seed = int(os.environ.get("KERNEL_SEED", torch.seed() % 2**32))
    print(f"KERNEL_SEED={seed}")
    torch.manual_seed(seed)
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, so that values that a kernel does not write are noticed."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            tensor = make(*args, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
