"""CPU and GPU in three ways of running decode steps, simulated: who waits for whom?

The durations are made up: eight kernels a step stand for some three hundred.
"""

import json
from pathlib import Path

PLAN, LAUNCH, KERNEL, SETTLE, KERNELS, STEPS = 4.0, 4.0, 1.5, 3.0, 8, 10
RECORD = Path("docs/measurements/m5_single.json")
WAYS = {"eager": "- graphs", "graph": "- pipelining", "pipelined": "m5_kernels"}
"""Each way, and what M5's bench calls the engine that runs so."""


def ends(way: str) -> list[float]:
    """When each step's last kernel ends."""
    cpu = gpu = 0.0  # two clocks
    done: list[float] = []
    num_launches = KERNELS if way == "eager" else 1
    for step in range(STEPS):
        cpu += PLAN
        for _ in range(num_launches):
            cpu += LAUNCH
            gpu = max(cpu, gpu) + KERNEL * KERNELS / num_launches
        done.append(gpu)
        settled = step - 1 if way == "pipelined" else step  # one step later
        if settled >= 0:
            cpu = max(cpu, done[settled]) + SETTLE
    return done


print("way         time from step to step   GPU busy")
for way in WAYS:
    *_, before, last = ends(way)
    print(f"{way:12}{last - before:22.1f}{KERNELS * KERNEL / (last - before):11.0%}")
record = json.loads(RECORD.read_text(encoding="utf-8"))
print(f"\nrecorded: {record['environment']['device']}, {record['model']}, one request")
for way, name in WAYS.items():
    print(f"{way:12}{record['contestants'][name]['median']['tpot_p50']:19.2f} ms")
