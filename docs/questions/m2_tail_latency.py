"""Why does tail latency fall? 30 requests arrive over time; each one's wait is counted in steps.

Every fourth wants 80 tokens, the others 8. Time is counted in steps, without a clock.
"""

import random

import m1_single
import m2_batching
from milestone_llm.lab.bench.workloads import WorkItem, exactly, serve

rng = random.Random(0)
items, step = [], 0
for index in range(30):
    num_tokens = 8 if index % 4 else 80
    items.append(WorkItem([5] * rng.randint(4, 20), exactly(num_tokens), arrival_step=step))
    step += rng.randint(0, 24)


def percentiles(values: list[int]) -> str:
    """Return the smallest values that are at least as large as 50, 95 and 99 percent of them."""
    return "".join(f"{sorted(values)[-(-len(values) * p // 100) - 1]:6}" for p in (50, 95, 99))


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
    to_first = [first[f"r{i}"] - item.arrival_step + 1 for i, item in enumerate(items)]
    to_last = [last[f"r{i}"] - item.arrival_step + 1 for i, item in enumerate(items) if i % 4]
    print(f"{engine.milestone:22}{percentiles(to_first)}       {percentiles(to_last)}")
