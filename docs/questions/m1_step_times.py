"""How long does a step take, depending on how many tokens it computes? Measured here and now.

One thread, and its CPU time: what other programs do at the same time matters little.
"""

import statistics
import time

import torch
from transformers import DynamicCache

from milestone_llm.models.checkpoint import load_model

CONTEXT = 64

torch.set_num_threads(1)
model = load_model("smollm2-135m", dtype="float32", device="cpu").model


@torch.inference_mode()
def cpu_ms(rows: int, tokens: int) -> float:
    """CPU time of a forward of new tokens in rows that have a context."""
    times = []
    for _ in range(4):
        cache = DynamicCache(config=model.config)
        model(torch.ones(rows, CONTEXT, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
        new = torch.ones(rows, tokens, dtype=torch.long)
        start = time.process_time()
        model(new, past_key_values=cache, logits_to_keep=1)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


print("rows   tokens a row    a step     a token")
for rows, tokens in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 16), (1, 64)):
    ms = cpu_ms(rows, tokens)
    print(f"{rows:4}{tokens:15}{ms:7.0f} ms{ms / (rows * tokens):9.1f} ms")
