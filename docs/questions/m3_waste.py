"""How much reserved memory holds nothing? Slots against blocks of several sizes.

The same 16 requests each time, with the KV memory of 4 regions of 512 tokens.
"""

import m2_batching
import m3_paged
from milestone_llm.lab.bench.workloads import mixed, serve

MEMORY, MAX_MODEL_LEN = 4 * 512, 512


def measure(engine) -> str:
    """Serve the work; average over steps."""
    serve(engine, mixed(engine.vocab_size))
    records = engine.tracer.records
    usage = [record.kv for record in records if record.kv.reserved_tokens]
    waste = [1 - kv.stored_tokens / kv.reserved_tokens for kv in usage]
    num_rows = [len(record.batch) for record in records]
    return (
        f"{sum(waste) / len(waste):12.1%}{max(num_rows):14}"
        f"{sum(num_rows) / len(num_rows):12.1f}{len(records):8}"
    )


print("layout                  empty   most at once   on average   steps")
common = {"device": "cpu", "max_model_len": MAX_MODEL_LEN, "trace": "memory"}
print("regions of 512  ", measure(m2_batching.LLMEngine("tiny-llama", max_num_seqs=4, **common)))
for block_size in (1, 4, 16, 64, 256):
    paged = m3_paged.LLMEngine(
        "tiny-llama", max_num_seqs=16, kv_cache_tokens=MEMORY, block_size=block_size, **common
    )
    print(f"blocks of {block_size:<6}", measure(paged))
