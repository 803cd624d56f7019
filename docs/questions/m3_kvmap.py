"""Six requests and memory for half of them: which request has each block, step by step? `-o
PATH.png`."""

import argparse

from m1_single import SamplingParams
from m3_paged import LLMEngine
from milestone_llm.lab.plots.kvmap import draw_kvmap

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
options = parser.parse_args()

engine = LLMEngine(
    "tiny-llama", device="cpu", max_model_len=128, kv_cache_tokens=13 * 16, trace="memory"
)
prompts = [[5] * length for length in (3, 5, 8, 6, 8, 5)]
lengths = (40, 96, 64, 32, 80, 56)
engine.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
print("wrote", draw_kvmap(engine.tracer.records, options.output))
