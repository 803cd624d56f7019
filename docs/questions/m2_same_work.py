"""The same 16 requests in a static and in a continuous batch; with `-o PATH.png`, drawn.

Steps depend on lengths alone, so a tiny model of random weights shows what a large one would do.
"""

import argparse

import m1_single
import m2_batching
from milestone_llm.lab.bench.workloads import mixed, serve
from milestone_llm.lab.plots.timeline import draw_timeline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", help="draw both timelines")
options = parser.parse_args()

print("                  steps  useful share  tokens per step  positions  positions per step")
traces = []
for package in (m1_single, m2_batching):
    engine = package.LLMEngine("tiny-llama", device="cpu", max_num_seqs=8, trace="memory")
    outputs = serve(engine, mixed(engine.vocab_size))
    num_tokens = sum(len(output.token_ids) for output in outputs)
    num_steps = engine.stats()["steps"]
    stats = engine.stats()
    names = ("prefill_tokens", "decode_tokens", "padding_tokens")
    positions = sum(stats[name] for name in names)
    print(
        f"{engine.milestone:16}{num_steps:7}{stats['useful_share']:14.1%}"
        f"{num_tokens / num_steps:17.2f}{positions:11,}{positions / num_steps:20.1f}"
    )
    traces.append(engine.tracer.records)
if options.output:
    labels = ["static batching", "continuous batching"]
    print("wrote", draw_timeline(traces, labels, options.output))
