"""What requests with a rule cost those beside them: M5 with 32 requests, some of them ruled.

    python -m docs.benchmarks.structured

A model with random weights; each ruled request has to write 300 letters and spaces at least, and
gets as many tokens as the others. Rounds in turns; the median of them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import m5_kernels
from docs.questions.structured_pipeline import byte_tokenizer
from m1_single import SamplingParams
from milestone_llm.command.cli import console, positive
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.report import table
from milestone_llm.structured import StructuredOutputsParams

NUM_REQUESTS, NUM_TOKENS = 32, 256
RULE = StructuredOutputsParams(regex="[a-z ]{300,400}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random-qwen3-0.6b")
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args()
    engine = m5_kernels.LLMEngine(
        args.model, tokenizer=byte_tokenizer(), max_model_len=1024, max_num_seqs=NUM_REQUESTS
    )
    engine.input_processor.grammars.eos_token_ids = [0]  # a random model has none of this tokenizer
    prompts = [[(7 * number + place) % 1000 for place in range(64)] for number in range(32)]
    common = {"temperature": 0.7, "seed": 1, "max_tokens": NUM_TOKENS}
    plain = SamplingParams(**common, ignore_eos=True)
    ruled = SamplingParams(**common, structured_outputs=RULE)
    seconds: dict[int, list[float]] = {0: [], 1: [], 8: [], 32: []}
    for number in range(-1, args.rounds):
        for num_ruled, times in seconds.items():
            params = [ruled] * num_ruled + [plain] * (NUM_REQUESTS - num_ruled)
            start = time.perf_counter()
            outputs = engine.generate(prompts, params)
            took = time.perf_counter() - start
            assert all(len(each.token_ids) == NUM_TOKENS for each in outputs)
            if number >= 0:  # the one before captures graphs
                times.append(took)
    console.print(f"{args.model}, {NUM_REQUESTS} requests, {NUM_TOKENS} tokens; {machine()}")
    console.print(versions())
    rows = []
    for num_ruled, times in seconds.items():
        step = 1e3 * statistics.median(times) / NUM_TOKENS
        rate = NUM_REQUESTS * NUM_TOKENS / statistics.median(times)
        rows.append([str(num_ruled), f"{rate:,.0f}", f"{step:.2f}"])
    console.print(table("", ["with a rule", "tok/s", "ms a step"], rows))


if __name__ == "__main__":
    main()
