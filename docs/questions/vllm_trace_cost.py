"""What the tracer for vLLM costs a step: CPU time of vLLM's scheduler alone, and bytes of trace."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from m4_prefix_chunked.tools.vllm.fetch import make_importable
from m4_prefix_chunked.tools.vllm.traffic import Arrival, Limits

NUM_OUTPUT = 40
WORK = ((32, 500), (128, 500), (128, 2000))
"""Requests, and the tokens of each prompt."""


def decode(kind: Any, num_requests: int, length: int) -> float:
    """Return the milliseconds of CPU time of a step of decode rows."""
    from m4_prefix_chunked.tools.vllm.run_vllm import make_request, make_scheduler, model_output

    blocks = num_requests * (length // 16 + 8)
    limits = Limits(16, blocks, num_requests, max_num_batched_tokens=8192, max_model_len=4000)
    scheduler, rng = make_scheduler(limits, kind), random.Random(1)
    for index in range(num_requests):
        tokens = [rng.randrange(100, 250) for _ in range(length)]
        arrival = Arrival(0, f"req-{index}", tokens, NUM_OUTPUT)
        scheduler.add_request(make_request(arrival.name, arrival, index, limits))
    spent, num_steps = 0.0, 0
    while scheduler.has_unfinished_requests():
        begin = time.process_time()
        plan = scheduler.schedule()
        requests = {name: scheduler.requests[name] for name in plan.num_scheduled_tokens}
        tokens_of = {
            name: [99] if one.num_computed_tokens >= one.num_tokens else []
            for name, one in requests.items()
        }
        scheduler.update_from_output(plan, model_output(tokens_of))
        if plan.total_num_scheduled_tokens == num_requests:
            spent += time.process_time() - begin
            num_steps += 1
    return 1e3 * spent / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="folder with vllm/ in it")
    make_importable(parser.parse_args().vllm)
    from vllm.v1.core.sched.scheduler import Scheduler

    from m4_prefix_chunked.tools.vllm.run_vllm import VERSION
    from milestone_llm.lab.vllm_steps import TracedScheduler

    print(f"vLLM {VERSION}, ms of CPU a decode step of the scheduler alone, and kB of trace a step")
    print("requests  tokens  as it is  traced  kB a step")
    with tempfile.TemporaryDirectory() as folder:
        for num_requests, length in WORK:
            trace = Path(folder) / "run.jsonl"
            os.environ["STEP_TRACE"] = str(trace)
            plain = decode(Scheduler, num_requests, length)
            traced = decode(TracedScheduler, num_requests, length)
            lines = trace.read_text(encoding="utf-8").splitlines()
            size = max(
                len(line) for line in lines if len(json.loads(line)["batch"]) == num_requests
            )
            print(f"{num_requests:8}  {length:6}  {plain:8.2f}  {traced:6.2f}  {size / 1e3:9.0f}")


if __name__ == "__main__":
    main()
