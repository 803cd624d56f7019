"""Continuous batching without batches: every step decides which requests run, as in M2, but each
request has a `past_key_values` of its own and a forward pass of its own.

So it has only M2's schedule, which separates the two gains. All three get the same work.

python -m docs.questions.m2_seed_batching               SmolLM2-135M; a minute or two
python -m docs.questions.m2_seed_batching tiny-llama    the counts, without times that mean much
"""

import statistics
import sys
import time

import torch
from transformers import DynamicCache

from m2_batching import LLMEngine
from milestone_llm.lab.bench.workloads import mixed
from milestone_llm.models.checkpoint import load_model

MAX_NUM_SEQS = 8


@torch.inference_mode()
def schedule_only(max_num_seqs: int) -> tuple[list[list[int]], list[float], int]:
    """Admit requests, compute each running one by itself, remove finished ones, and repeat.

    Returns:
        Tokens and time to the first one of each request, and the number of steps.
    """
    tokens: list[list[int]] = [[] for _ in items]
    ttft, num_steps = [0.0] * len(items), 0
    # caches of running requests
    waiting, caches = list(range(len(items))), dict[int, DynamicCache]()
    start = time.perf_counter()
    while waiting or caches:
        while waiting and len(caches) < max_num_seqs:
            caches[waiting.pop(0)] = DynamicCache()
        for index, cache in list(caches.items()):
            new = torch.tensor([tokens[index][-1:] or items[index].prompt])
            logits = model(new, past_key_values=cache, logits_to_keep=1).logits
            tokens[index].append(int(logits[0, -1].argmax()))
            ttft[index] = ttft[index] or time.perf_counter() - start
            if len(tokens[index]) == items[index].params.max_tokens:
                del caches[index]  # its memory is free
        num_steps += 1
    return tokens, ttft, num_steps


def m2() -> tuple[list[list[int]], list[float], int]:
    """Run the engine: the same schedule, and one forward pass for all rows of a step."""
    before = engine.stats()["steps"]
    outputs = engine.generate([item.prompt for item in items], [item.params for item in items])
    ttft = [output.metrics.ttft or 0.0 for output in outputs]
    return [output.token_ids for output in outputs], ttft, engine.stats()["steps"] - before


name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
model = load_model(name, device="cpu", dtype="float32").model
engine = LLMEngine(model, max_num_seqs=MAX_NUM_SEQS, device="cpu", dtype="float32")
items = mixed(engine.vocab_size)
num_tokens = sum(item.params.max_tokens for item in items)
engine.warm_up()
print(f"{len(items)} requests, {num_tokens:,} output tokens, at most {MAX_NUM_SEQS} at a time")
print("               steps   forward passes   seconds   tok/s   TTFT, mean")
answers = []
for name, run in (
    ("one by one", lambda: schedule_only(1)),
    ("schedule only", lambda: schedule_only(MAX_NUM_SEQS)),
    ("M2", m2),
):
    start = time.perf_counter()
    tokens, ttft, num_steps = run()
    seconds = time.perf_counter() - start
    num_forwards = num_steps if run is m2 else num_tokens
    answers.append(tokens)
    print(
        f"{name:14}{num_steps:6}{num_forwards:17,}{seconds:10.1f}"
        f"{num_tokens / seconds:8.1f}{statistics.fmean(ttft):10.1f} s"
    )
print(f"same tokens: {all(tokens == answers[0] for tokens in answers)}")
