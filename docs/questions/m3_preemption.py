"""What is the cost of a pool that is too small: tokens computed again, or blocks copied?

16 requests of 16..128 tokens in and out, all there at the start.
"""

from m3_paged import LLMEngine
from milestone_llm.lab.bench.workloads import mixed, serve
from milestone_llm.lab.explorer.kv_figures import kv_figures

answers = []
print("pool, tokens  preemption  preemptions  computed again  blocks moved  steps  same tokens")
for kv_cache_tokens in (2048, 1024, 512):
    for preemption in ("recompute", "swap"):
        limits = {"max_num_seqs": 16, "max_model_len": 256, "kv_cache_tokens": kv_cache_tokens}
        engine = LLMEngine(
            "tiny-llama", device="cpu", preemption=preemption, trace="memory", **limits
        )
        answers.append([output.token_ids for output in serve(engine, mixed(engine.vocab_size))])
        kv = kv_figures(engine.tracer.records)
        moved = 2 * kv["num_swapped_blocks"]  # out and in again
        print(
            f"{kv_cache_tokens:12}  {preemption:10}{kv['num_preemptions']:13}"
            f"{kv['num_recomputed_tokens']:16}{moved:14}{len(engine.tracer.records):7}"
            f"{answers[-1] == answers[0]!s:>13}"
        )
