"""How long does a step take, depending on how many tokens it computes? Measured here and now."""

import statistics
import time

import torch
from transformers import DynamicCache

from m1_single.checkpoint import load_model

CONTEXT = 64

model = load_model("smollm2-135m", dtype="float32", device="cpu").model
print("rows  tokens a row   ms a step   ms a token")
for rows, tokens in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 16), (1, 64)):
    times = []
    for _ in range(5):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.ones(rows, CONTEXT, dtype=torch.long), past_key_values=cache)
            new = torch.ones(rows, tokens, dtype=torch.long)
            start = time.perf_counter()
            model(new, past_key_values=cache)
            times.append(1e3 * (time.perf_counter() - start))
    best = statistics.median(times)
    print(f"{rows:4} {tokens:13} {best:11.1f} {best / (rows * tokens):12.1f}")
