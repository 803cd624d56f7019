"""Where a step's time goes: on the host, in each kernel, between kernels.

The host's parts are timed without a profiler, which would slow them down. Kernels are timed with
`torch.profiler`, in other steps of the same run. On a CPU the "kernels" are torch's operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.bench.workloads import WorkItem

HOST_PARTS = {
    "schedule": "decide what the next step computes",
    "launch": "send what changed, start the kernels",
    "wait": "wait for the tokens of the step before",
    "update": "take its tokens in",
    "other": "outputs, counts, Python between",
}
NUM_SHOWN = 14
Kernels = list[tuple[str, float, float]]
"""Name, launches a step, microseconds a step. The most expensive first."""


def profile_steps(engine: Any, items: Sequence[WorkItem], num_steps: int = 20) -> dict[str, Any]:
    """Serve `items` up to their middle. Then time `num_steps` steps, profile as many, and print
    both.

    Returns:
        What was printed: averages in microseconds a step, and the mean number of rows.

    Raises:
        InputError: the workload ends before that.
    """
    ids = [engine.add_request(item.prompt, item.params) for item in items]
    try:
        half = max(item.params.max_tokens for item in items) // 2
        for _ in range(half):
            engine.step()
        before = engine.stats()
        host = _host_parts(engine, num_steps)
        after = engine.stats()
        if not engine.has_unfinished_requests():
            raise InputError(f"the requests ended before step {half + num_steps}: give longer ones")
        is_cuda = engine.model.device.type == "cuda"
        kernels, wall_us = _kernel_times(engine.step, num_steps, is_cuda)
    finally:
        for request_id in ids:
            engine.abort(request_id)
    num_rows = (after["rows"] - before["rows"]) / max(1, after["steps"] - before["steps"])
    console.print(
        f"\nA step, average of {num_steps} with {num_rows:.0f} rows: {sum(host.values()):,.0f} us",
        style="bold",
    )
    on_host = [(name, f"{us:,.0f}", HOST_PARTS[name]) for name, us in host.items()]
    grid = table("", ["on the host", "us", ""], on_host)
    grid.columns[2].justify = "left"
    console.print(grid)
    rest = kernels[NUM_SHOWN:]
    others = "others", sum(n for _, n, _ in rest), sum(us for _, _, us in rest)
    gaps = max(0.0, wall_us - sum(us for _, _, us in kernels))
    shown = [*kernels[:NUM_SHOWN], others, ("gaps", 0.0, gaps)]
    rows = [(name, f"{n:,.1f}", f"{us:,.1f}", f"{us / wall_us:.1%}") for name, n, us in shown]
    grid = table("", ["in kernels (profiled steps)", "launches", "us", "share"], rows)
    grid.columns[0].max_width = 46
    console.print("", grid)
    return {"num_rows": num_rows, "host_us": host, "kernels": kernels, "profiled_wall_us": wall_us}


def _host_parts(engine: Any, num_steps: int) -> dict[str, float]:
    """Return microseconds a step for each of `HOST_PARTS`. "other" is the rest of the wall time."""
    spent = dict.fromkeys(HOST_PARTS, 0.0)
    scheduler, runner = engine.scheduler, engine.runner

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[name] += 1e6 * (time.perf_counter() - start) / num_steps

        return run

    timed_launch = timed("launch", runner.launch)

    def launch(plan: StepPlan) -> LaunchedStep:
        return LaunchedStep(timed("wait", timed_launch(plan).wait))

    with (
        patch.object(scheduler, "schedule", timed("schedule", scheduler.schedule)),
        patch.object(scheduler, "update", timed("update", scheduler.update)),
        patch.object(runner, "launch", launch),
    ):
        start = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        wall_us = 1e6 * (time.perf_counter() - start) / num_steps
    return {**spent, "other": wall_us - sum(spent.values())}


def _kernel_times(
    step: Callable[[], object], num_steps: int, is_cuda: bool
) -> tuple[Kernels, float]:
    """Return what a step runs on the device (on a CPU: its operators), and a step's wall time."""
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    synchronize = torch.cuda.synchronize if is_cuda else torch.cpu.synchronize
    with profile(activities=[activity], acc_events=True) as profiler:
        synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        wall = time.perf_counter() - start
    found = [
        (each.key, each.count / num_steps, spent / num_steps)
        for each in profiler.key_averages()
        if (spent := each.self_device_time_total if is_cuda else each.self_cpu_time_total)
        and "ynchronize" not in each.key
    ]
    return sorted(found, key=lambda kernel: -kernel[2]), 1e6 * wall / num_steps
