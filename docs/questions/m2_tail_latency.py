"""Why does tail latency fall? 30 requests arrive over time; each one's wait is counted in steps.

Every fourth wants 80 tokens, the others 8. A step stands for time here: no clock is involved.
"""

import random

import m1_single
import m2_batching
from m1_single import SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem, serve

rng = random.Random(0)
items, step = [], 0
for index in range(30):
    params = SamplingParams(max_tokens=80 if index % 4 == 0 else 8, ignore_eos=True)
    items.append(WorkItem([5] * rng.randint(4, 20), params, arrival_step=step))
    step += rng.randint(0, 24)


def percentile(values: list[int], percent: int) -> int:
    """The smallest value that is at least as large as `percent` of them."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


print("steps from arrival to      first token            last token of the 8-token requests")
print("                         p50   p95   p99          p50   p95   p99")
for package in (m1_single, m2_batching):
    engine = package.LLMEngine("tiny-llama", device="cpu", max_num_seqs=8, trace="memory")
    serve(engine, items)
    first, last = {}, {}
    for record in engine.tracer.records:
        for row in record.batch:
            if row.sampled_token is not None:
                first.setdefault(row.request_id, record.step)
                last[row.request_id] = record.step
    arrival = {f"r{index}": item.arrival_step for index, item in enumerate(items)}
    short = [f"r{i}" for i, item in enumerate(items) if item.params.max_tokens == 8]
    to_first = [first[name] - arrival[name] + 1 for name in arrival]
    to_last = [last[name] - arrival[name] + 1 for name in short]
    numbers = [[percentile(values, p) for p in (50, 95, 99)] for values in (to_first, to_last)]
    cells = ["".join(f"{number:6}" for number in row) for row in numbers]
    print(f"{engine.milestone:22}{cells[0]}       {cells[1]}")
