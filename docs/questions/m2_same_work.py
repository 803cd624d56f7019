"""The same 16 requests in a static and in a continuous batch; with `-o PATH.png`, drawn.

Steps depend only on lengths, so a tiny model of random weights shows the same as a large one.
"""

import argparse

import m1_single
import m2_batching
from milestone_llm.lab.bench.workloads import mixed, serve
from milestone_llm.lab.plots.timeline import draw_timeline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", help="draw the timelines")
parser.add_argument("--static", action="store_true", help="the static batch alone")
options = parser.parse_args()

packages = {"static batching": m1_single, "continuous batching": m2_batching}
if options.static:
    del packages["continuous batching"]
print("                  steps  useful share  tokens per step  positions  positions per step")
traces = []
for package in packages.values():
    engine = package.LLMEngine("tiny-llama", device="cpu", max_num_seqs=8, trace="memory")
    outputs = serve(engine, mixed(engine.vocab_size))
    num_tokens = sum(len(output.token_ids) for output in outputs)
    stats = engine.stats()
    num_steps = stats["steps"]
    positions = sum(stats[f"{kind}_tokens"] for kind in ("prefill", "decode", "padding"))
    print(
        f"{engine.milestone:16}{num_steps:7}{stats['useful_share']:14.1%}"
        f"{num_tokens / num_steps:17.2f}{positions:11,}{positions / num_steps:20.1f}"
    )
    traces.append(engine.tracer.records)
if options.output:
    print("wrote", draw_timeline(traces, list(packages), options.output))
