"""Continuous batching without batches: who runs is decided anew at every step, as in M2, but each
request keeps a `past_key_values` of its own and has a forward pass of its own.

So it has M2's schedule alone, and tells the two gains apart. All three get the same work.

python -m docs.questions.m2_seed_batching               SmolLM2-135M; a minute or two
python -m docs.questions.m2_seed_batching tiny-llama    the counts, without times that mean much
"""

import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from m2_batching import LLMEngine
from milestone_llm.lab.bench.workloads import mixed
from milestone_llm.models.checkpoint import load_model

MAX_NUM_SEQS = 8
MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"


@dataclass
class Running:
    """A request: its tokens, the first of them not yet computed, and its KV."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)
    ttft: float = 0.0


@dataclass
class Run:
    """What a way of serving took."""

    name: str
    tokens: list[list[int]]
    num_steps: int
    num_forwards: int
    seconds: float
    ttft: float


@torch.inference_mode()
def schedule_only(name: str, max_num_seqs: int) -> Run:
    """Admit, compute each running request by itself, let go of who has finished; again."""
    requests = [Running(item.prompt, item.params.max_tokens) for item in items]
    waiting, running = deque(requests), list[Running]()
    num_steps = num_forwards = 0
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.popleft())
        for request in running:
            new = request.tokens[-1:] or request.prompt
            output = model(torch.tensor([new]), past_key_values=request.cache, logits_to_keep=1)
            request.tokens.append(int(output.logits[0, -1].argmax()))
            request.ttft = request.ttft or time.perf_counter() - start
            num_forwards += 1
        running = [each for each in running if len(each.tokens) < each.max_tokens]
        num_steps += 1
    seconds = time.perf_counter() - start
    ttft = statistics.fmean(each.ttft for each in requests)
    return Run(name, [each.tokens for each in requests], num_steps, num_forwards, seconds, ttft)


def m2(name: str) -> Run:
    """The engine: the same schedule, and one forward pass for all rows of a step."""
    before, start = engine.stats()["steps"], time.perf_counter()
    outputs = engine.generate([item.prompt for item in items], [item.params for item in items])
    seconds, steps = time.perf_counter() - start, engine.stats()["steps"] - before
    ttft = statistics.fmean(output.metrics.ttft or 0.0 for output in outputs)
    return Run(name, [output.token_ids for output in outputs], steps, steps, seconds, ttft)


model = load_model(MODEL, device="cpu", dtype="float32").model
engine = LLMEngine(model, max_num_seqs=MAX_NUM_SEQS, device="cpu", dtype="float32")
items = mixed(engine.vocab_size)
engine.warm_up()
runs = [schedule_only("one by one", 1), schedule_only("schedule only", MAX_NUM_SEQS), m2("M2")]

num_tokens = sum(len(tokens) for tokens in runs[0].tokens)
print(f"{len(items)} requests, {num_tokens:,} output tokens, at most {MAX_NUM_SEQS} at a time")
print("               steps   forward passes   seconds   tok/s   TTFT, mean")
for run in runs:
    print(
        f"{run.name:14}{run.num_steps:6}{run.num_forwards:17,}{run.seconds:10.1f}"
        f"{num_tokens / run.seconds:8.1f}{run.ttft:10.1f} s"
    )
print(f"same tokens: {all(run.tokens == runs[0].tokens for run in runs)}")
