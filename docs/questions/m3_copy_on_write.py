"""Four completions of one prompt, against the same prompt four times: blocks, tokens, copies."""

from m1_single import SamplingParams
from m3_paged import LLMEngine


def serve(num_requests: int, n: int):
    """Serve a prompt of 38 tokens `num_requests` times, with n completions each of 12 tokens."""
    engine = LLMEngine("tiny-llama", device="cpu", max_model_len=128, block_size=16, trace="memory")
    params = SamplingParams(max_tokens=12, n=n, seed=1, ignore_eos=True)
    engine.generate([list(range(5, 43))] * num_requests, [params] * num_requests)
    return engine


print("                        prompt tokens computed   most blocks used   blocks copied")
for what, num_requests, n in (("4 requests", 4, 1), ("1 request with n=4", 1, 4)):
    engine = serve(num_requests, n)
    stats = engine.stats()
    print(
        f"{what:24}{stats['prefill_tokens']:22}{stats['kv']['watermark']:19}"
        f"{stats['copied_blocks']:16}"
    )

print("\nwith n=4, step by step:")
for record in engine.tracer.records[:3]:
    for event in record.events:
        print(f"    step {record.step}: {event.type:14}{event.request_id:6}{event.blocks}")
    tables = {row.request_id: row.blocks for row in record.batch}
    print(f"    step {record.step}: tables {tables}")
