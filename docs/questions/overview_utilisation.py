"""How much of the time do the CPU cores compute, and how much of that for somebody?

The same 16 requests in M1 to M4 and one after the other, eight rows at most. Busy is the CPU time
of this process over threads x wall time, waiting in a loop included; useful are the computed
positions that belong to a request.

python -m docs.questions.overview_utilisation               SmolLM2-135M; some minutes
python -m docs.questions.overview_utilisation tiny-llama    in a second, to try it
"""

import sys
import time

import torch

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
from milestone_llm.lab.bench.workloads import mixed
from milestone_llm.models.checkpoint import load_model

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
model = load_model(MODEL, device="cpu", dtype="float32").model
print(f"{MODEL}, float32, threads: {torch.get_num_threads()}")
print("                                 steps   seconds   tok/s    busy   useful   busy and useful")
for name, package, num_rows in (
    ("m1_single, one by one", m1_single, 1),
    ("m1_single", m1_single, 8),
    ("m2_batching", m2_batching, 8),
    ("m3_paged", m3_paged, 8),
    ("m4_prefix_chunked", m4_prefix_chunked, 8),
):
    engine = package.LLMEngine(model, max_num_seqs=num_rows, max_model_len=512, device="cpu")
    items = mixed(engine.vocab_size)
    engine.warm_up()
    before = engine.stats()["steps"]
    wall, cpu = time.perf_counter(), time.process_time()
    engine.generate([item.prompt for item in items], [item.params for item in items])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    stats, num_tokens = engine.stats(), sum(item.params.max_tokens for item in items)
    busy, useful = cpu / (wall * torch.get_num_threads()), stats["useful_share"]
    print(
        f"{name:30}{stats['steps'] - before:8,}{wall:10.1f}{num_tokens / wall:8.1f}"
        f"{busy:8.0%}{useful:9.0%}{busy * useful:18.0%}"
    )
