"""What happens to a request of 10,000 tokens, and to those that decode while it is computed?"""

import textwrap
import time

from m1_single import SamplingParams
from m2_batching import LLMEngine
from milestone_llm.models.tiny_models import build_tiny_model

model = build_tiny_model("llama", max_position_embeddings=16_384)
LONG = [7] * 10_000
DECODING = SamplingParams(max_tokens=12, ignore_eos=True)

print("max_num_batched_tokens=2048, the default:")
engine = LLMEngine(model, max_num_seqs=4, max_model_len=12_000)
try:
    engine.add_request(LONG)
except ValueError as error:
    print(textwrap.indent(textwrap.fill(f"ValueError: {error}", 76), "    "))

print("max_num_batched_tokens=16384:")
engine = LLMEngine(
    model, max_num_seqs=4, max_model_len=12_000, max_num_batched_tokens=16_384, trace="memory"
)
for _ in range(3):
    engine.add_request([5, 6, 7], DECODING)
while engine.has_unfinished_requests():
    if engine.stats()["steps"] == 6:
        engine.add_request(LONG, SamplingParams(max_tokens=3, ignore_eos=True))
    start = time.perf_counter()
    engine.step()
    record, ms = engine.tracer.records[-1], 1e3 * (time.perf_counter() - start)
    if record.step in range(4, 10):
        print(
            f"    step {record.step}: {record.num_decode_tokens} rows decode, "
            f"{record.num_prefill_tokens:5} prompt tokens, {ms:6.0f} ms; "
            f"KV reserved {record.kv.reserved_tokens:6}, stored {record.kv.stored_tokens:6}"
        )
