"""A prompt of 300 tokens comes while three requests decode: who waits for it? `-o PATH.png` draws.

Computed positions stand for time: on real models a step takes the longer the more it computes.
"""

import argparse
from itertools import pairwise

import m3_paged
import m4_prefix_chunked
from m1_single import SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem, serve
from milestone_llm.lab.plots.timeline import draw_timeline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png")
options = parser.parse_args()


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, and so many tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


items = [WorkItem([5] * 6, exactly(24)) for _ in range(3)]
items.append(WorkItem([7] * 300, exactly(6), arrival_step=6))

traces, labels = [], []
if not options.output:
    print("                          steps   r0's longest pause        r3's first token")
    print("policy           budget            steps  positions    after steps  positions")
for policy, budget in (("m3_paged", 2048), ("prefill_first", 40), ("mixed", 40)):
    package, fields = m4_prefix_chunked, {"prefill_policy": policy}
    if policy == "m3_paged":
        package, fields = m3_paged, {}
    engine = package.LLMEngine(
        "tiny-llama",
        device="cpu",
        max_model_len=512,
        max_num_batched_tokens=budget,
        trace="memory",
        **fields,
    )
    serve(engine, items)
    records = engine.tracer.records
    done = [0]  # positions computed before each step
    for record in records:
        done.append(done[-1] + record.num_prefill_tokens + record.num_decode_tokens)
    ends = {
        name: [
            record.step
            for record in records
            for row in record.batch
            if row.request_id == name and row.sampled_token is not None
        ]
        for name in ("r0", "r3")
    }
    pauses = list(pairwise(ends["r0"]))
    steps = max(after - before for before, after in pauses)
    positions = max(done[after + 1] - done[before + 1] for before, after in pauses)
    first = ends["r3"][0]
    if not options.output:
        print(
            f"{policy:15}{budget:8}{len(records):7}{steps:9}{positions:11}"
            f"{first - 5:15}{done[first + 1] - done[6]:11}"
        )
    if budget == 40:
        traces.append(records)
        labels.append(f'prefill_policy="{policy}"')
if options.output:
    print("wrote", draw_timeline(traces, labels, options.output))
