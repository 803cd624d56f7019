"""What does a prompt of 1,000 tokens cost in chunks of several sizes? Arithmetic and a count.

Each chunk is a step: it reads all weights, and the KV of every chunk before it.
"""

from m1_single import SamplingParams
from m4_prefix_chunked import LLMEngine

print("budget   steps: weights read   KV tokens read again   longest step, positions")
for budget in (16, 64, 256, 1000):
    engine = LLMEngine(
        "tiny-llama",
        device="cpu",
        max_model_len=1010,
        max_num_batched_tokens=budget,
        trace="memory",
    )
    engine.generate([[5] * 1000], SamplingParams(max_tokens=1))
    rows = [row for record in engine.tracer.records for row in record.batch]
    read_again = sum(row.start for row in rows)
    longest = max(row.num_new_tokens for row in rows)
    print(f"{budget:6}{len(rows):22}{read_again:23,}{longest:26}")
