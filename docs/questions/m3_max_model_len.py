"""What M3 gains over M2 on the same memory, by the length that a request may have."""

import m2_batching
import m3_paged
from milestone_llm.lab.bench.workloads import mixed, serve

KV_TOKENS = 1024
print(f"memory for {KV_TOKENS:,} tokens, 16 requests of 16..64 tokens in and out")
print("               rows at a time           steps")
print("max_model_len  regions  blocks    regions  blocks")
for max_model_len in (128, 256, 512):
    found = []
    for package, num_seqs, fields in (
        (m2_batching, KV_TOKENS // max_model_len, {}),
        (m3_paged, 16, {"kv_cache_tokens": KV_TOKENS}),
    ):
        engine = package.LLMEngine(
            "tiny-llama",
            device="cpu",
            max_model_len=max_model_len,
            max_num_seqs=num_seqs,
            trace="memory",
            **fields,
        )
        serve(engine, mixed(engine.vocab_size, input_len=(16, 64), output_len=(16, 64)))
        records = engine.tracer.records
        found.append((max(len(record.batch) for record in records), len(records)))
    (rows, steps), (paged_rows, paged_steps) = found
    print(f"{max_model_len:13}{rows:9}{paged_rows:8}{steps:11}{paged_steps:8}")
