"""How much reserved memory is empty? Slots and blocks of several sizes.

The same 16 requests each time, with the KV memory of 4 regions of 512 tokens.
"""

import m2_batching
import m3_paged
from milestone_llm.lab.bench.workloads import mixed, serve
from milestone_llm.lab.explorer.kv_figures import kv_figures

common = {"device": "cpu", "max_model_len": 512, "trace": "memory"}
engines = {"regions of 512": m2_batching.LLMEngine("tiny-llama", max_num_seqs=4, **common)}
for block_size in (1, 4, 16, 64, 256):
    engines[f"blocks of {block_size}"] = m3_paged.LLMEngine(
        "tiny-llama", max_num_seqs=16, kv_cache_tokens=4 * 512, block_size=block_size, **common
    )
print("layout                  empty   most at once   on average   steps")
for name, engine in engines.items():
    serve(engine, mixed(engine.vocab_size))
    records = engine.tracer.records
    kv, num_rows = kv_figures(records), sum(len(record.batch) for record in records)
    print(
        f"{name:17}{kv['waste_share']:12.1%}{kv['max_concurrent']:14}"
        f"{num_rows / len(records):12.1f}{len(records):8}"
    )
