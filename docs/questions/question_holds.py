"""What does a request hold while it is scheduled? M4, between the beginning and the end of two
requests."""

from m1_single import SamplingParams
from m4_prefix_chunked import LLMEngine

engine = LLMEngine("tiny-llama", device="cpu", max_model_len=64, block_size=4)
params = SamplingParams(temperature=0.8, seed=7, max_tokens=9, ignore_eos=True)
engine.add_request([5, 9, 33, 7, 12, 80], params, request_id="chat", priority=1)
for _ in range(3):
    engine.step()
request = engine.requests["chat"]
for name in ("request_id", "status", "priority", "arrival", "seed", "token_ids"):
    print(f"request.{name:24}{getattr(request, name)}")
for name in ("num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_in_flight"):
    print(f"request.{name:24}{getattr(request, name)}")
print(f"kv.block_tables['chat']         {engine.scheduler.kv.blocks.block_tables['chat']}")
print(f"prefix_cache.hashes['chat']     {len(engine.scheduler.kv.prefix_cache.hashes['chat'])}")
