"""What happens to a request of 10,000 tokens, and to those that decode while it is computed?"""

from m2_batching import LLMEngine
from milestone_llm.lab.bench.workloads import WorkItem, exactly, serve
from milestone_llm.models.tiny_models import build_tiny_model

model = build_tiny_model("llama", max_position_embeddings=16_384)
items = [WorkItem([5, 6, 7], exactly(12)) for _ in range(3)]
items.append(WorkItem([7] * 10_000, exactly(3), arrival_step=6))
for budget in (2048, 16_384):
    print(f"max_num_batched_tokens={budget}:")
    limits = {"max_num_seqs": 4, "max_model_len": 12_000, "max_num_batched_tokens": budget}
    engine = LLMEngine(model, **limits, trace="memory")
    try:
        serve(engine, items)
    except ValueError as error:
        print(f"    ValueError: {error}")
        continue
    for record in engine.tracer.records[4:10]:
        print(
            f"    step {record.step}: {record.num_decode_tokens} rows decode, "
            f"{record.num_prefill_tokens:5} prompt tokens, {record.execute_ms:6.0f} ms; "
            f"KV reserved {record.kv.reserved_tokens:6}, stored {record.kv.stored_tokens:6}"
        )
