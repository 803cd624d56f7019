"""A run of M5 with device times, made on a CPU: its host is timed, its device is made up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import m5_kernels
from docs.questions import m5_device_trace as program
from engine_helpers import make_engine, tiny_model
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.tracer import Tracer

CLOCKS_APART = 123_456.0
"""Microseconds by which the profiler's clock is ahead of the host's."""
NAMES = [
    *("_rms_norm_kernel", "nvjet_tst_64x32_h_bz_TNT", "_rope_kv_write_kernel"),
    "_flash_decode_kernel",
    "void cublasLt::splitKreduce_kernel<32, 16, int>(float*)",
]
NUM_KERNELS = 40


def device_run(is_pipelined: bool) -> list[StepRecord]:
    """Six requests, two of which come later; their steps have graphs if they are pipelined."""
    engine = make_engine(
        m5_kernels, tiny_model("qwen3"), max_num_seqs=8, max_model_len=112, block_size=16,
        kv_cache_tokens=8 * 112, async_scheduling=is_pipelined,
    )  # fmt: skip
    tracer, host = Tracer(), program.HostTimes(engine)
    engine.step_log.watchers.append(tracer)
    small = {"FIRST": [100, 90, 80, 70], "LATER": [30, 48], "SHARED": 32}
    with patch.multiple(program, **small):
        host.watch(partial(program.serve, engine, 3))
    begin = host.steps[0].parts[0][1]
    marks = [
        (begin - 4e-3 + number * 1e-4, begin - 4e-3 + number * 1e-4 + 6e-6) for number in range(4)
    ]
    events = list(profiled(host.steps, marks, is_pipelined))
    return program.with_device_times(tracer.records, host.steps, events, marks)


def profiled(steps: Any, marks: Any, has_graphs: bool) -> Iterator[dict[str, Any]]:
    """What a profiler would say: a call for each kernel, or one for all; then the kernels."""
    correlation = 0
    for mark in marks:
        correlation += 1
        yield from _launched(correlation, "cudaLaunchKernel", *mark)
        yield _kernel(correlation, "fill", mark[1], 2.0)
    free = 0.0
    for step in steps:
        _, begin, end = next(part for part in step.parts if part[0] == "launch")
        correlation += 1
        if has_graphs:
            yield from _launched(correlation, "cudaGraphLaunch", end - 1e-5, end)
        for number in range(NUM_KERNELS):
            start, us = end, 4.0 + 8.0 * (number % 5 == 1)
            if not has_graphs:
                correlation += 1
                start = begin + (end - begin) * (number + 1) / NUM_KERNELS
                yield from _launched(correlation, "cuLaunchKernelEx", start - 1e-6, start)
            start = max(start, free + 1e-6)
            yield _kernel(correlation, NAMES[number % len(NAMES)], start, us)
            free = start + 1e-6 * us


def _launched(correlation: int, name: str, begin: float, end: float) -> Iterator[dict[str, Any]]:
    yield {
        "cat": "cuda_driver",
        "name": name,
        "ts": 1e6 * begin + CLOCKS_APART,
        "dur": 1e6 * (end - begin),
        "args": {"correlation": correlation},
    }


def _kernel(correlation: int, name: str, start: float, us: float) -> dict[str, Any]:
    return {
        "cat": "kernel",
        "name": name,
        "ts": 1e6 * start + CLOCKS_APART,
        "dur": us,
        "args": {"correlation": correlation},
    }
