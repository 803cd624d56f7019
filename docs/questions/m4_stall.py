"""A prompt of 300 tokens comes while three requests decode: who waits for it? `-o PATH.png` draws.

Time is counted in computed positions: on real models a step takes longer, the more it computes.
"""

import argparse
from itertools import pairwise

import m3_paged
import m4_prefix_chunked
from milestone_llm.lab.bench.workloads import WorkItem, exactly, serve
from milestone_llm.lab.plots.timeline import draw_timeline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png")
options = parser.parse_args()

items = [WorkItem([5] * 6, exactly(24)) for _ in range(3)]
items.append(WorkItem([7] * 300, exactly(6), arrival_step=6))
common = {"device": "cpu", "max_model_len": 512, "trace": "memory"}
engines = {"m3_paged": m3_paged.LLMEngine("tiny-llama", **common)}
for policy in ("prefill_first", "mixed"):
    engines[policy] = m4_prefix_chunked.LLMEngine(
        "tiny-llama", prefill_policy=policy, max_num_batched_tokens=40, **common
    )
print("                          steps   r0's longest pause        r3's first token")
print("policy           budget            steps  positions    after steps  positions")
for policy, engine in engines.items():
    serve(engine, items)
    records = engine.tracer.records
    done = [0]  # positions computed before each step
    for record in records:
        done.append(done[-1] + record.num_prefill_tokens + record.num_decode_tokens)
    sampled = {"r0": [], "r3": []}  # steps in which they sampled
    for record in records:
        for row in record.batch:
            if row.request_id in sampled and row.sampled_token is not None:
                sampled[row.request_id].append(record.step)
    pauses = list(pairwise(sampled["r0"]))
    steps = max(after - before for before, after in pauses)
    positions = max(done[after + 1] - done[before + 1] for before, after in pauses)
    first = sampled["r3"][0]
    print(
        f"{policy:15}{engine.config.max_num_batched_tokens:8}{len(records):7}{steps:9}"
        f"{positions:11}{first - 5:15}{done[first + 1] - done[6]:11}"
    )
if options.output:
    del engines["m3_paged"]
    traces = [engine.tracer.records for engine in engines.values()]
    labels = [f'prefill_policy="{policy}"' for policy in engines]
    print("wrote", draw_timeline(traces, labels, options.output))
