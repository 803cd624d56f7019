"""What does a pool that is too small cost: tokens computed again, or blocks copied?"""

from m3_paged import LLMEngine
from milestone_llm.lab.bench.workloads import mixed, serve


def run(**fields):
    """Serve 16 requests of 16..128 tokens in and out."""
    engine = LLMEngine(
        "tiny-llama", device="cpu", max_num_seqs=16, max_model_len=256, trace="memory", **fields
    )
    return engine, [output.token_ids for output in serve(engine, mixed(engine.vocab_size))]


_, expected = run()
num_prompt_tokens = sum(len(item.prompt) for item in mixed(199))
print("pool, tokens  preemption  preemptions  computed again  blocks moved  steps  same tokens")
for kv_cache_tokens in (2048, 1024, 512):
    for preemption in ("recompute", "swap"):
        engine, tokens = run(kv_cache_tokens=kv_cache_tokens, preemption=preemption)
        records = engine.tracer.records
        num_decoded = sum(map(len, tokens)) - len(tokens)
        needed = num_prompt_tokens + num_decoded
        stats = engine.stats()
        again = stats["prefill_tokens"] + stats["decode_tokens"] - needed
        events = [event for record in records for event in record.events]
        moved = sum(len(event.blocks) for event in events if event.type.startswith("swap"))
        print(
            f"{kv_cache_tokens:12}  {preemption:10}{stats['preemptions']:13}{again:16}{moved:14}"
            f"{len(records):7}{tokens == expected!s:>13}"
        )
