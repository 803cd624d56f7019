"""What a CUDA graph of Hugging Face's modules brings, and then the fused decoder, by family.

    python -m docs.benchmarks.families

On a GPU. First tokens of small models in fp32 are compared with those of Hugging Face's `generate`.
Then models of 1 to 3 billion random weights in bf16 generate, for one request and for 32, with M4
and with three forms of M5: modules launched one by one, modules in graphs, and the fused decoder
where there is one. Prompts have 128 tokens. A figure is the better of two runs after a warm-up.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import m4_prefix_chunked
import m5_kernels
from m1_single import SamplingParams
from m5_kernels.tools.bench_parts import without_fused
from milestone_llm.cli import positive
from milestone_llm.consoles import console
from milestone_llm.lab.bench.record import commit, machine, versions
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.families import VOCAB_SIZE, build_small_model
from milestone_llm.models.pretrained import quiet_transformers

GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        **GROUPED,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 262_144,
    },
    "phi3": {"num_hidden_layers": 20},
    "olmo2": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "vocab_size": 100_352,
    },
    "glm4": {"num_hidden_layers": 8},
    "gpt2": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "qwen3_moe": {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 128},
}
"""What differs from the defaults of each family's config: Llama-3.2-1B, Gemma-3-1B, 20 of Phi-3's
32 layers, OLMo-2-1B, 8 of GLM-4-9B's 40, GPT-2 XL, 4 of Qwen3-30B-A3B's 48."""

PROMPT_TOKENS, ROWS = 128, (1, 32)
SEED = 0


CONTESTANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "M4": (m4_prefix_chunked, {}),
    "M5, eager": (m5_kernels, {"adapt_backend": without_fused, "enforce_eager": True}),
    "M5, graphs": (m5_kernels, {"adapt_backend": without_fused}),
    "M5": (m5_kernels, {}),
}


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters of requests that end at their length."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def check(family: str) -> str:
    """Compare tokens of a small model in fp32 with Hugging Face's. Returns what computed them.

    Raises:
        RuntimeError: they differ.
    """
    with quiet_transformers():
        model = build_small_model(family).cuda()
    rng = random.Random(SEED)
    prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in (3, 21, 9)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": VOCAB_SIZE}
        output = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **options)
        wanted.append(output[0, len(prompt) :].tolist())
    names = []
    for name in ("M5, graphs", "M5"):
        package, fields = CONTESTANTS[name]
        engine = package.LLMEngine(
            model, max_num_seqs=4, max_num_batched_tokens=64, block_size=16, **fields
        )
        found = [output.token_ids for output in engine.generate(prompts, greedy(8))]
        names.append(str(engine.stats()["decoder"]))
        if found != wanted:
            raise RuntimeError(f"{family}, {names[-1]}: {found}, not {wanted}")
    return ", ".join(dict.fromkeys(names))


def build(family: str) -> PreTrainedModel:
    """Return a model of real size with random weights in bf16, on the GPU."""
    config = AutoConfig.for_model(family, **SHAPES[family])
    with torch.random.fork_rng(), torch.device("cuda"), quiet_transformers():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def measure(model: PreTrainedModel, name: str, num_tokens: int) -> tuple[str, list[float]]:
    """Return what computes, and the tokens a second for each number of requests."""
    package, fields = CONTESTANTS[name]
    longest = PROMPT_TOKENS + num_tokens + 16
    engine = package.LLMEngine(
        model,
        max_num_seqs=max(ROWS),
        max_model_len=longest,
        max_num_batched_tokens=PROMPT_TOKENS * max(ROWS),
        kv_cache_tokens=2 * longest * max(ROWS),
        enable_prefix_caching=False,
        **fields,
    )
    vocab_size, rng, rates = model.config.vocab_size, random.Random(SEED), []
    for num_rows in ROWS:
        prompts = [
            [rng.randrange(10, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)
        ]
        engine.generate(prompts, greedy(8))
        seconds = []
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.generate(prompts, greedy(num_tokens))
            seconds.append(time.perf_counter() - start)
        rates.append(num_rows * num_tokens / min(seconds))
    return str(engine.stats()["decoder"]), rates


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m docs.benchmarks.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=positive, default=64, help="output of each request")
    parser.add_argument("--no-check", action="store_true", help="compare no tokens first")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parser().parse_args(arguments)
    logging.getLogger("m5_kernels").setLevel(logging.WARNING)
    console.print(f"{machine()}, {torch.cuda.get_device_name()}; {versions()}; commit {commit()}")
    workload = f"{PROMPT_TOKENS} tokens in, {args.tokens} out, for {ROWS} requests"
    console.print(f"{workload}; bf16, random weights and prompts of seed {SEED}\n")
    for family in [] if args.no_check else args.families:
        start = time.perf_counter()
        console.print(f"tokens equal Hugging Face's: {family} ({check(family)})", end=" ")
        console.print(f"{time.perf_counter() - start:.0f} s")
    for family in args.families:
        model = build(family)
        num_weights = sum(weight.numel() for weight in model.parameters()) / 1e9
        rows = []
        for name in CONTESTANTS:
            decoder, rates = measure(model, name, args.tokens)
            steps = [1000 * num / rate for num, rate in zip(ROWS, rates, strict=True)]
            by = decoder.replace("Hugging Face's ", "").replace("CUDA ", "")
            rows.append(
                [name, by, *(f"{rate:,.0f}" for rate in rates), *(f"{ms:.2f}" for ms in steps)]
            )
            gc.collect()
            torch.cuda.empty_cache()
        head = ["", "by", *(f"tok/s, {num}" for num in ROWS), *(f"ms, {num}" for num in ROWS)]
        console.print()
        console.print(table(f"{family}, {num_weights:.2f} billion weights", head, rows))
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
