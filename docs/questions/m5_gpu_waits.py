"""A decode step of M4 on a GPU, and how long the GPU computes in it, there and in the others.

python -m docs.questions.m5_gpu_waits random-qwen3-0.6b
"""

import gc
import importlib
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from milestone_llm import MILESTONES
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.trace.tracer import Tracer

REQUESTS, PROMPT, STEPS = 4, 500, 20


def measure(milestone: str, model: str) -> None:
    """Print the average of some steps; before, in M4, the trace of one."""
    package = importlib.import_module(milestone)
    memory = {"kv_cache_tokens": REQUESTS * 1024}
    fields = memory if hasattr(package.EngineConfig, "kv_cache_tokens") else {}
    engine = package.LLMEngine(model, max_num_seqs=REQUESTS, max_model_len=1024, **fields)
    engine.warm_up()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for number in range(REQUESTS):
        engine.add_request([7 + number] * PROMPT, params)
    for _ in range(STEPS):  # the prompts, graphs
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    step_ms = 1e3 * (time.perf_counter() - start) / STEPS
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_time_total]
    busy_ms = sum(event.device_time_total for event in kernels) / 1e3 / STEPS
    if milestone == "m4_prefix_chunked":  # in M5, a step is settled in the call after its own
        engine.step_log.watchers.append(Tracer.from_option("console"))
        engine.step()
        print()
    print(
        f"{milestone}: {step_ms:.1f} ms a step; {len(kernels) / STEPS:,.0f} kernels and copies, "
        f"{busy_ms:.1f} ms of work for the GPU, {busy_ms / step_ms:.0%}",
        flush=True,
    )


if not torch.cuda.is_available():
    sys.exit("This measures how long a GPU waits, and torch finds no GPU here.")
for name in MILESTONES:
    measure(name, *sys.argv[1:])
    gc.collect()
    torch.cuda.empty_cache()
