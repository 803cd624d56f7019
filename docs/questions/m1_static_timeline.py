"""Sixteen requests in static batches of eight, drawn: `-o PATH.png`.

Steps depend on lengths alone, so a tiny model of random weights shows what a large one would do.
"""

import argparse

from m1_single import LLMEngine
from milestone_llm.lab.bench.workloads import mixed, serve
from milestone_llm.lab.plots.timeline import draw_timeline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
options = parser.parse_args()

engine = LLMEngine("tiny-llama", device="cpu", max_num_seqs=8, trace="memory")
serve(engine, mixed(engine.vocab_size))
print("wrote", draw_timeline([engine.tracer.records], ["static batching"], options.output))
