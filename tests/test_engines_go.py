"""An engine that nobody has any more is gone at once. None waits for the garbage collector: it may
come while another engine captures its graphs."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest

from helpers.engines import greedy, make_engine

PACKAGES = ["m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels"]
KINDS: list[tuple[str, dict[str, Any]]] = [
    *((package, {}) for package in PACKAGES),
    ("m3_paged", {"preemption": "swap", "swap_space_tokens": 64}),
    ("m4_prefix_chunked", {"speculation": "ngram"}),
    ("m5_kernels", {"speculation": "ngram"}),
    ("m5_kernels", {"quantization": "int8"}),
    ("m5_kernels", {"enforce_eager": True, "trace": "memory"}),
]


@pytest.mark.parametrize(("package", "fields"), KINDS)
def test_an_engine_goes_with_its_last_reference(package: str, fields: dict[str, Any]) -> None:
    milestone = importlib.import_module(package)
    make_engine(milestone, **fields)  # libraries that are imported keep frames, once
    gc.collect()
    gc.disable()
    try:
        engine = make_engine(milestone, **fields)
        engine.generate([[3, 4, 5], [6, 7]], greedy(4))
        parts = [weakref.ref(each) for each in (engine, engine.core, engine.runner)]
        del engine
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()
