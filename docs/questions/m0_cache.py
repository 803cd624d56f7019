"""The same 16 tokens with the KV cache and without: positions, operations, bytes, time."""

import sys
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from docs.questions.m0_transformer import Model
from milestone_llm.models.checkpoint import load_model

NUM_PROMPT, NUM_NEW = 32, 16


def generate(model: Model, prompt: list[int], has_cache: bool) -> tuple[list[int], int]:
    """Generate greedy tokens. Returns them, and how many positions were computed."""
    known, caches, num_computed = list(prompt), None, 0
    while len(known) < len(prompt) + NUM_NEW:
        new = known[-1:] if caches else known
        logits, new_caches = model.forward(new, caches)
        num_computed += len(new)
        caches = new_caches if has_cache else None
        known.append(int(logits.argmax()))
        print(".", end="", file=sys.stderr, flush=True)
    return known, num_computed


def main() -> None:
    """Generate both ways and count."""
    checkpoint = load_model("smollm2-135m", dtype="float32", device="cpu").model
    model = Model(checkpoint)
    head = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    in_layers = sum(weight.numel() for weight in checkpoint.parameters()) - head
    prompt = list(range(1000, 1000 + NUM_PROMPT))
    _, (cache, *_) = model.forward(prompt, None)
    cache_bytes = sum(tensor.nbytes for tensor in cache) * len(model.layers)

    print(f"{in_layers:,} weights in layers, {head:,} in the LM head, 4 bytes each")
    print(f"{cache_bytes // NUM_PROMPT:,} bytes of KV per token\n")
    print("                              with the cache    without", flush=True)
    answers, columns = [], []
    for has_cache in (True, False):
        start = time.perf_counter()
        tokens, num_computed = generate(model, prompt, has_cache)
        seconds = time.perf_counter() - start
        with FlopCounterMode(display=False) as counter:
            generate(model, prompt, has_cache)
        two_a_weight = 2 * (in_layers * num_computed + head * NUM_NEW)
        answers.append(tokens)
        columns.append((num_computed, two_a_weight / 1e9, counter.get_total_flops() / 1e9, seconds))
    print(file=sys.stderr)
    positions, estimates, counts, times = zip(*columns, strict=True)
    print("positions computed     {:20,} {:10,}".format(*positions))
    print("GFLOP, two a weight    {:20.1f} {:10.1f}".format(*estimates))
    print("GFLOP counted          {:20.1f} {:10.1f}".format(*counts))
    print("time                   {:18.2f} s {:8.2f} s".format(*times))
    print("same tokens:", answers[0] == answers[1])


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
