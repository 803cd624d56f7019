"""When exactly does a request need a new block? Block size 4, a prompt of 6 tokens."""

from m1_single import SamplingParams
from m3_paged import LLMEngine

SIZE = 4
engine = LLMEngine("tiny-llama", device="cpu", max_model_len=32, block_size=SIZE, trace="memory")
engine.add_request([5] * 6, SamplingParams(max_tokens=9, ignore_eos=True))
print("known tokens   of them to compute   last slot written   blocks   new block   known % 4")
while engine.has_unfinished_requests():
    (request,) = engine.requests.values()
    known, start = request.num_tokens, request.num_computed_tokens
    engine.step()
    record = engine.tracer.records[-1]
    new = sum(len(event.blocks) for event in record.events if event.type == "alloc")
    num_blocks = -(-known // SIZE)
    sign = f"yes, {new}" if new else "-"
    print(f"{known:12}{known - start:21}{known - 1:20}{num_blocks:9}{sign:>12}{known % SIZE:12}")
