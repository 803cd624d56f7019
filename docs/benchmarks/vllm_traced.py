"""The real vLLM, traced, and M5 on the same requests: a page with both. Needs a GPU and vLLM.

    python -m docs.benchmarks.vllm_traced MODEL -o both.html
    python -m docs.benchmarks.vllm_traced FOLDER --load-format dummy -o both.html

Requests come at once: two beginnings that several share, and more tokens than the KV memory holds,
so that both wait, find and preempt. vLLM runs in a process of its own, which gives its memory back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

BLOCK_SIZE, NUM_BLOCKS = 16, 56
LIMITS = {"max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 256}


def requests() -> list[tuple[list[int], int]]:
    """Return prompts and how many tokens each wants."""
    rng = random.Random(0)

    def some(number: int) -> list[int]:
        return [rng.randrange(1000, 20000) for _ in range(number)]

    heads = [some(96), some(48)]
    return [(rng.choice(heads) + some(rng.randint(8, 90)), rng.randint(16, 160)) for _ in range(16)]


def run_vllm(model: str, load_format: str, trace: str) -> None:
    """Serve the requests with vLLM, traced."""
    os.environ["STEP_TRACE"], os.environ["STEP_TRACE_PROMPTS"] = trace, "1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        load_format=load_format,
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS + 1,
        scheduler_cls="milestone_llm.lab.vllm_steps.TracedAsyncScheduler",
        **LIMITS,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens, _ in requests()]
    params = [
        SamplingParams(temperature=0, max_tokens=number, ignore_eos=True, detokenize=False)
        for _, number in requests()
    ]
    llm.generate(prompts, params)
    llm.llm_engine.engine_core.shutdown()  # else this process may wait for it without end


def run_m5(model: str, load_format: str, trace: str) -> None:
    """Serve the requests with M5, traced."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from m5_kernels import LLMEngine, SamplingParams

    source: Any = model
    if load_format == "dummy":
        with torch.device("cuda"):
            config = AutoConfig.from_pretrained(model)
            source = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fields: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_cache_tokens": BLOCK_SIZE * NUM_BLOCKS}
    engine = LLMEngine(source, trace=trace, **fields, **LIMITS)
    engine.warm_up()
    params = [
        SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)
        for _, number in requests()
    ]
    engine.generate([tokens for tokens, _ in requests()], params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Hugging Face id or a folder")
    parser.add_argument(
        "--load-format", default="auto", help="dummy: random weights, others in each engine"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("both.html"))
    args = parser.parse_args()
    traces = [args.output.with_suffix(f".{name}.jsonl") for name in ("vllm", "m5")]
    words = args.model, args.load_format, str(traces[0].resolve())
    process = multiprocessing.get_context("spawn").Process(target=run_vllm, args=words)
    process.start()
    process.join()
    if process.exitcode:
        parser.error("vLLM ended with an error")
    run_m5(args.model, args.load_format, str(traces[1]))
    from milestone_llm.lab.explorer.page import Run, write_page
    from milestone_llm.trace.jsonl import read_run

    budget = LIMITS["max_num_batched_tokens"]
    runs = [
        Run(label, read_run(trace), budget)
        for label, trace in zip(("vLLM", "M5"), traces, strict=True)
    ]
    write_page(runs, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
