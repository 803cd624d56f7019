"""The same on a GPU, measured: a prompt computed by M5, and its blocks copied out and in.

python -m docs.questions.m3_swap_measured random-qwen3-0.6b random-qwen3-8b
"""

import gc
import statistics
import sys
import time

import torch

from m3_paged.block_cache import BlockCache
from m5_kernels import LLMEngine, SamplingParams
from milestone_llm.core.plan import StepPlan

ONE_TOKEN = SamplingParams(max_tokens=1)
LENGTHS, ROUNDS, BLOCK_SIZE = (128, 2048, 16_384), 5, 16


def milliseconds(work) -> float:
    """The median of some rounds, after one that compiles."""
    times = []
    for _ in range(1 + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def measure(model: str) -> None:
    """Print a line for each length."""
    longest = max(LENGTHS)
    engine = LLMEngine(
        model, max_num_seqs=1, max_model_len=longest + 1, max_num_batched_tokens=longest,
        kv_cache_tokens=longest + BLOCK_SIZE, enable_prefix_caching=False,
    )  # fmt: skip
    num_blocks = longest // BLOCK_SIZE
    cache = BlockCache(engine.model, num_blocks, BLOCK_SIZE, num_host_blocks=num_blocks)
    for num_tokens in LENGTHS:
        pairs = [(block, block) for block in range(num_tokens // BLOCK_SIZE)]
        out, back = StepPlan(), StepPlan()
        out.swap_outs, back.swap_ins = pairs, pairs
        again = milliseconds(lambda n=num_tokens: engine.generate([[7] * n], ONE_TOKEN))
        copied = milliseconds(lambda a=out, b=back: (cache.move_blocks(a), cache.move_blocks(b)))
        print(f"{model:20}{num_tokens:11,}{again:20.1f}{copied:17.1f}", flush=True)


if not torch.cuda.is_available():
    sys.exit("This measures a GPU and the bus to it, and torch finds no GPU here.")
print("                         tokens   compute again, ms   out and in, ms")
for name in sys.argv[1:]:
    measure(name)
    gc.collect()
    torch.cuda.empty_cache()
