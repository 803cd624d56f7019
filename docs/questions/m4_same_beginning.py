"""How much of the work is done twice when prompts begin alike? A trace of M3, and of M4.

Six requests of one system prompt (96 tokens) and a few tokens of their own, two steps apart.
"""

import m3_paged
import m4_prefix_chunked
from m1_single import SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem, serve

SYSTEM_PROMPT = [5 + i % 90 for i in range(96)]
items = [
    WorkItem(
        SYSTEM_PROMPT + [100 + 10 * number + i for i in range(6)],
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        arrival_step=2 * number,
    )
    for number in range(6)
]

tokens = []
for package in (m3_paged, m4_prefix_chunked):
    engine = package.LLMEngine("tiny-llama", device="cpu", max_model_len=128, trace="memory")
    outputs = serve(engine, items)
    tokens.append([output.token_ids for output in outputs])
    records = engine.tracer.records
    print(f"{engine.milestone}")
    for record in records[:6:2]:
        rows = [f"{row.request_id} +{row.num_new_tokens}" for row in record.batch]
        print(f"    step {record.step}: {', '.join(rows)}")
    num_blocks = max(record.kv.used for record in records)
    prefill = engine.stats()["prefill_tokens"]
    print(f"    ... in all {prefill} prompt tokens computed, at most {num_blocks} blocks in use")
print(f"same tokens: {tokens[0] == tokens[1]}")
