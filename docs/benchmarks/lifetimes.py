"""M5 with and without groups of layers, on a GPU, with the shape of Gemma 3 1B and random weights.

    python -m docs.benchmarks.lifetimes

One request of 8,000 tokens, 64 of 2,000 in memory for all, and 64 of 2,000 in memory for 17; each
gets 256 tokens. Both engines in turn, two times; the best of three runs of each.
"""

from __future__ import annotations

import gc
import random
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from m5_kernels import LLMEngine, SamplingParams

SHAPE = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "head_dim": 256,
    "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512, "vocab_size": 32768,
}  # fmt: skip
NUM_OUT = 256
WORK = (
    ("1 of 8,000 tokens", 1, 8000, {"max_model_len": 8400, "kv_cache_tokens": 16_800}),
    ("64 of 2,000, memory for all", 64, 2000, {"max_model_len": 2400, "kv_cache_tokens": 160_000}),
    ("64 of 2,000, memory for 17", 64, 2000, {"max_model_len": 2400, "kv_cache_tokens": 40_000}),
)


def timed(model: PreTrainedModel, is_off: bool, prompts: list[list[int]], fields: dict) -> str:
    """Return tokens a second, milliseconds of prefill, microseconds of a decode step, and
    preemptions."""
    engine = LLMEngine(
        model,
        disable_hybrid_kv_cache_manager=is_off,
        enable_prefix_caching=False,
        max_num_seqs=len(prompts),
        **fields,
    )

    def seconds(num_out: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - start

    seconds(NUM_OUT)
    prefill, whole = (min(seconds(number) for _ in range(3)) for number in (1, NUM_OUT))
    step = (whole - prefill) / (NUM_OUT - 1)
    rate = len(prompts) * NUM_OUT / whole
    preemptions = engine.stats()["preemptions"]
    return f"{rate:8,.0f} {1000 * prefill:8.1f} {1e6 * step:8,.0f} {preemptions:8}"


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed 0, bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = AutoConfig.for_model("gemma3_text", **SHAPE)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.eval().requires_grad_(False)
    rng = random.Random(0)
    print("                                          tok/s  prefill  step us preempted")
    for name, number, length, fields in WORK:
        prompts = [[rng.randrange(10, 30_000) for _ in range(length)] for _ in range(number)]
        for is_off in (True, False) * 2:
            figures = timed(model, is_off, prompts, fields)
            print(f"{name:28} {'' if is_off else 'groups':6} {figures}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
