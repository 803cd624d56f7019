"""Traces of M5 with the device's own times: what the GPU does while the host plans and launches.

    python -m docs.questions.m5_device_trace -o docs/traces

The same requests twice: kernel by kernel, each step waited for (`enforce_eager`), and with graphs,
pipelined. Four prompts come at once, and their step is too large for a graph; two more come while
they decode, and share steps with them. Times are the profiler's: it makes a launch a little slower.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.trace.device_times import DeviceTimes, Span
from milestone_llm.trace.jsonl import JsonlSink
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.tracer import Tracer

WAYS = {"launched": True, "graphs": False}
"""End of the file's name, and whether graphs and the pipeline are left out."""
FIRST, LATER = [1000, 900, 800, 700], [300, 480]
"""Tokens of the prompts that come at once, and of those that come later."""
OUTPUTS = [12, 22, 16, 22, 8, 10]
LATER_STEPS = [6, 12]
"""Steps before which those come."""
SHARED = 256
"""Tokens with which the last prompt begins as the first one does."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
"""Categories of the profiler's events."""
NUM_MARKS = 8


@dataclass
class HostStep:
    """What the host did for one step: name, begin and end in seconds of `time.perf_counter()`."""

    plan: StepPlan
    parts: list[tuple[str, float, float]] = field(default_factory=list)


class HostTimes:
    """Times the parts of steps; a context in which the engine's are watched."""

    def __init__(self, engine: Any) -> None:
        self.steps: list[HostStep] = []
        scheduler, runner = engine.scheduler, engine.runner
        self._parts = [(scheduler, "schedule", self._schedule), (scheduler, "update", self._update)]
        self._parts.append((runner, "launch", self._launch))
        self._schedule_of, self._update_of = scheduler.schedule, scheduler.update
        self._launch_of = runner.launch

    def watch(self, work: Callable[[], None]) -> None:
        """Do some work of the engine and note its parts."""
        patches = [patch.object(*part) for part in self._parts]
        for each in patches:
            each.start()
        try:
            work()
        finally:
            for each in patches:
                each.stop()

    def _timed(self, step: HostStep, name: str, function: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        step.parts.append((name, begin, time.perf_counter()))
        return result

    def _schedule(self) -> StepPlan:
        step = HostStep(StepPlan())
        step.plan = self._timed(step, "plan", self._schedule_of)
        if not step.plan.is_empty:
            self.steps.append(step)
        return step.plan

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        step = self.steps[-1]
        launched = self._timed(step, "launch", self._launch_of, plan)
        return LaunchedStep(partial(self._timed, step, "wait", launched.wait))

    def _update(self, plan: StepPlan, sampled: Any) -> Any:
        step = next(each for each in self.steps if each.plan is plan)
        return self._timed(step, "settle", self._update_of, plan, sampled)


def with_device_times(
    records: Sequence[StepRecord],
    steps: Sequence[HostStep],
    events: Sequence[dict[str, Any]],
    marks: Sequence[tuple[float, float]],
) -> list[StepRecord]:
    """The records, each with the times of its step.

    Args:
        steps: what the host did, one for each record.
        events: of the profiler, as in Chrome's trace; microseconds of a clock of its own.
        marks: begin and end of the first launches, in seconds: they say what that clock showed.
    """
    work = sorted((e for e in events if e.get("cat") in DEVICE_WORK), key=itemgetter("ts"))
    numbers = {event["args"]["correlation"] for event in work}
    calls = sorted((e for e in events if e.get("cat") in CALLS), key=itemgetter("ts"))
    calls = [call for call in calls if call["args"].get("correlation") in numbers]
    offset = statistics.median(
        1e6 * (begin + end) / 2 - (call["ts"] + call["dur"] / 2)
        for (begin, end), call in zip(marks, calls, strict=False)
    )

    begins = [1e6 * begin for step in steps for name, begin, _ in step.parts if name == "launch"]
    step_of: dict[int, int] = {}
    graph_launches = set()
    for call in calls:
        step_of[call["args"]["correlation"]] = bisect_right(begins, call["ts"] + offset) - 1
        if "GraphLaunch" in call["name"]:
            graph_launches.add(call["args"]["correlation"])
    ran: list[list[dict[str, Any]]] = [[] for _ in steps]
    number = -1  # before the first step: the marks
    for event in work:  # the device keeps the order of the launches
        number = step_of.get(event["args"]["correlation"], number)
        if number >= 0:
            ran[number].append(event)

    made, seen = [], set()
    for number, (record, step) in enumerate(zip(records, steps, strict=True)):
        if not ran[number]:
            raise ValueError(f"the profiler saw no kernel of step {number}")
        zero = 1e6 * step.parts[0][1]
        kernels = [
            span(_short(event["name"]), event["ts"] + offset - zero, event["dur"])
            for event in ran[number]
        ]
        launches = {event["args"]["correlation"] for event in ran[number]}
        is_graph = not launches.isdisjoint(graph_launches)
        busy, end = 0.0, kernels[0]["start_us"]
        for each in kernels:
            busy += max(0.0, each["start_us"] + each["us"] - max(end, each["start_us"]))
            end = max(end, each["start_us"] + each["us"])
        kind = is_graph, record.num_prefill_tokens > 0, record.num_decode_tokens > 0
        parts = [
            span(name, 1e6 * begin - zero, 1e6 * (end - begin)) for name, begin, end in step.parts
        ]
        times: DeviceTimes = {
            "host": parts,
            "is_graph": is_graph,
            "num_launches": len(launches),
            "num_kernels": len(kernels),
            "start_us": kernels[0]["start_us"],
            "us": round(end - kernels[0]["start_us"], 1),
            "busy_us": round(busy, 1),
            "kernels": [] if kind in seen else kernels,
        }
        seen.add(kind)
        made.append(replace(record, step=number, device=times))
    return made


def span(name: str, start_us: float, us: float) -> Span:
    """A span, rounded; nothing begins before its step."""
    return {"name": name, "start_us": round(max(0.0, start_us), 1), "us": round(us, 1)}


def _short(name: str) -> str:
    """A kernel's name without return type, arguments and namespaces."""
    name = name.replace("(anonymous namespace)::", "")
    plain = name.removeprefix("void ").partition("<")[0].partition("(")[0].strip()
    return plain.rpartition("::")[2][:40]


def serve(engine: Any, seed: int) -> None:
    """The requests, the later ones when it is their turn."""
    rng = random.Random(seed)
    vocab_size = engine.model.config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(size)] for size in FIRST + LATER]
    prompts[-1][:SHARED] = prompts[0][:SHARED]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in OUTPUTS]
    names = iter(range(len(prompts)))

    def add(number: int) -> None:
        engine.add_request(prompts[number], params[number], request_id=f"r{number}")

    for _ in FIRST:
        add(next(names))
    count = 0
    while engine.has_unfinished_requests():
        if count in LATER_STEPS:
            add(next(names))
        engine.step()
        count += 1


def record(model: str, enforce_eager: bool, profile_path: Path) -> list[StepRecord]:
    """Serve the requests twice to get warm, and once under the profiler."""
    from m5_kernels import LLMEngine

    engine = LLMEngine(
        model,
        max_num_seqs=8,
        max_model_len=1152,
        kv_cache_tokens=8 * 1152,
        max_num_batched_tokens=4096,
        enforce_eager=enforce_eager,
    )
    engine.warm_up()
    for seed in (1, 2):
        serve(engine, seed)
    engine.reset_prefix_cache()
    tracer, host = Tracer(), HostTimes(engine)
    engine.step_log.watchers.append(tracer)
    mark = torch.zeros(1, device="cuda")
    marks = []
    gc.collect()
    gc.disable()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(NUM_MARKS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            mark.zero_()
            marks.append((begin, time.perf_counter()))
        torch.cuda.synchronize()
        host.watch(partial(serve, engine, 3))
        torch.cuda.synchronize()
    gc.enable()
    profiler.export_chrome_trace(str(profile_path))
    events = json.loads(profile_path.read_text(encoding="utf-8"))["traceEvents"]
    return with_device_times(tracer.records, host.steps, events, marks)


def summary(records: Sequence[StepRecord]) -> list[str]:
    """A line for each step."""
    lines = ["step  rows  tokens  launches  kernels  graph  busy us  gaps us  device waited us"]
    end = 0.0
    for each in records:
        assert each.device is not None
        times, begin = each.device, 1e6 * each.start_s + each.device["start_us"]
        tokens = each.num_prefill_tokens + each.num_decode_tokens
        cells = [each.step, len(each.batch), tokens, times["num_launches"], times["num_kernels"]]
        numbers = [
            times["busy_us"],
            times["us"] - times["busy_us"],
            max(0.0, begin - end) if end else 0.0,
        ]
        words = [*map(str, cells), "yes" if times["is_graph"] else "no"]
        words += [f"{number:,.0f}" for number in numbers]
        widths = (4, 4, 6, 8, 7, 5, 7, 7, 16)
        lines.append(
            "  ".join(word.rjust(width) for word, width in zip(words, widths, strict=True))
        )
        end = begin + times["us"]
    return lines


def main() -> int:
    """Record and write both traces, and print what is in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", default="random-qwen3-0.6b")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the profiler's files, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This asks a GPU what it did when, and torch finds no GPU here.", file=sys.stderr)
        return 1
    print(f"On one {torch.cuda.get_device_name()}, torch {torch.__version__}.")
    with tempfile.TemporaryDirectory() as folder:
        write_traces(options, options.keep or Path(folder))
    return 0


def write_traces(options: argparse.Namespace, folder: Path) -> None:
    """Record both ways; the profiler's files go to a folder."""
    for name, enforce_eager in WAYS.items():
        records = record(options.model, enforce_eager, folder / f"profile_{name}.json")
        path = options.output / f"m5_h200_{name}.jsonl.gz"
        sink = JsonlSink(path)
        for each in records:
            sink(each)
        print(f"\n{path.name}", *summary(records), sep="\n", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
