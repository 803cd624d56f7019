"""How much guesses bring on a GPU, on texts that repeat and on one that does not.

    python -m docs.questions.spec_speed random-qwen3-0.6b 1 4 16 32 64 --guesses 3 7

What comes out is forced: after sampling, each token is replaced by that of a given text at the same
place. So guesses come true as for a model that writes the text, at the cost of the real one. Tokens
are words, blanks and signs. The numbers are requests at one time, and all of them guess, however
many they are. At the end nothing is forced, and tokens with and without guesses are compared.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from m5_kernels import LLMEngine, SamplingParams
from m5_kernels.tools.measure import gpu_command

ROOT = Path(__file__).parents[2]
NUM_OUT = 320
ROUNDS = {"random": 4}
"""Of a text; others have two. Nothing comes true there, so the differences are small."""
NUM_FREE, FREE_LENGTH = 8, 128
UNFORCED = -1


def texts() -> dict[str, tuple[list[int], list[int]]]:
    """Token ids of prompt and output, by name."""
    ids: dict[str, int] = {}

    def tokens_of(text: str) -> list[int]:
        words = re.findall(r"\w+|\s+|[^\w\s]", text)
        return [ids.setdefault(word, 1000 + len(ids)) for word in words]

    code = (ROOT / "m4_prefix_chunked/scheduler.py").read_text(encoding="utf-8")
    edited = re.sub(r"\bbudget\b", "allowance", re.sub(r"\brequest\b", "sequence", code))
    page = (ROOT / "docs/m3_paged.md").read_text(encoding="utf-8")
    quotes = "\n".join(page[:12_000].split("\n")[::3])
    prose = [
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("scale", "serving")
    ]
    rng = random.Random(0)
    noise = [[rng.randrange(1000, 150_000) for _ in range(number)] for number in (100, NUM_OUT)]
    return {
        "edit": (tokens_of(code)[:2500], tokens_of(edited)[:NUM_OUT]),
        "quotes": (tokens_of(page)[:2500], tokens_of(quotes)[:NUM_OUT]),
        "prose": (tokens_of(prose[0])[:1000], tokens_of(prose[1])[:NUM_OUT]),
        "random": (noise[0], noise[1]),
    }


def force(engine: Any, script: torch.Tensor) -> None:
    """Let every request say the script: its token at each place, whatever was sampled."""
    runner = getattr(engine.runner, "runner", engine.runner)  # that of guesses has another
    sampler = runner.device_step.sampler
    sample = sampler.sample

    def forced(logits: Any, rows: Any, positions: torch.Tensor, needs: Any) -> torch.Tensor:
        tokens = sample(logits, rows, positions, needs)
        said = script[positions.clamp(0, len(script) - 1)]
        return torch.where((tokens >= 0) & (said != UNFORCED), said, tokens)

    sampler.sample = forced


def rate(engine: Any, prompt: list[int], output: list[int], count: int) -> tuple[float, float]:
    """Output tokens a second, and tokens a step and row, from the first token of anybody on.

    So of several requests the prompts of the later ones are in it.
    """
    params = SamplingParams(temperature=0, max_tokens=len(output), ignore_eos=True)
    for number in range(count):  # the first token differs: no prefix is found
        engine.add_request([number + 1, *prompt], params)
    first, num_before = None, 0
    while engine.has_unfinished_requests():
        for done in engine.step():
            if first is None:
                first, num_before = time.perf_counter(), engine.stats()["steps"]
            assert not done.finished or done.token_ids == output
    seconds, num_steps = time.perf_counter() - (first or 0.0), engine.stats()["steps"] - num_before
    return count * (len(output) - 1) / seconds, (len(output) - 1) / num_steps


def free_tokens(engine: Any, count: int) -> list[list[int]]:
    """Greedy tokens of `NUM_FREE` requests, so many at a time."""
    params = SamplingParams(temperature=0, max_tokens=FREE_LENGTH, ignore_eos=True)
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 150_000) for _ in range(100)] for _ in range(NUM_FREE)]
    outputs: list[Any] = []
    for first in range(0, NUM_FREE, count):
        outputs += engine.generate(prompts[first : first + count], params)
    return [output.token_ids for output in outputs]


def main(arguments: argparse.Namespace) -> None:
    """Measure each text without guesses and with them, in turns, and print a line each."""
    counts, arms = arguments.counts, [0, *arguments.guesses]
    all_rows = max(*counts, NUM_FREE)
    engine = LLMEngine(
        arguments.model,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=all_rows,
        kv_cache_tokens=3200 * all_rows,
        speculation="ngram",
        num_speculative_tokens=max(arms),
        speculation_max_num_seqs=all_rows,
    )
    scheduler: Any = engine.scheduler
    script = torch.full((NUM_OUT,), UNFORCED, dtype=torch.int32, device="cuda")
    force(engine, script)  # before a graph is captured
    engine.warm_up()

    def choose(num_guesses: int) -> None:
        engine.reset_prefix_cache()
        speculation = scheduler.speculation
        speculation.num_tokens, speculation.max_rows = num_guesses, all_rows * (num_guesses > 0)

    for count in (1, NUM_FREE):
        told = []
        for arm in arms:
            choose(arm)
            told.append(free_tokens(engine, count))
        for arm, tokens in zip(arms[1:], told[1:], strict=True):
            num_equal = sum(a == b for a, b in zip(tokens, told[0], strict=True))
            print(
                f"nothing forced, {count} at a time, {arm} guesses: {num_equal} of {NUM_FREE} "
                f"requests of {FREE_LENGTH} tokens get the same tokens as without",
                flush=True,
            )
    print("text   requests    tok/s, then for each number of guesses tok/s, times faster")
    for name, (prompt, output) in texts().items():
        if name not in arguments.texts:
            continue
        script[: len(output)] = torch.tensor(output, dtype=torch.int32)
        for count in counts if name in ("edit", "random") else counts[:1]:
            found: dict[int, list[tuple[float, float]]] = {arm: [] for arm in arms}
            for number in range(ROUNDS.get(name, 2)):
                for arm in sorted(arms, reverse=number % 2 == 1):
                    choose(arm)
                    found[arm].append(rate(engine, prompt, output, count))
            plain = [one for one, _ in found.pop(0)]
            line = f"{name:6} {count:8} {statistics.median(plain):8,.0f}"
            line += f" ({min(plain):,.0f} to {max(plain):,.0f})"
            for arm, rates in found.items():
                ratios = [one / other for (one, _), other in zip(rates, plain, strict=True)]
                line += (
                    f" | {arm}: {statistics.median(one for one, _ in rates):6,.0f} "
                    f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), "
                    f"{statistics.median(number for _, number in rates):.1f} a step and row"
                )
            print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m docs.questions.spec_speed")
    parser.add_argument("model")
    parser.add_argument("counts", type=int, nargs="+")
    parser.add_argument("--guesses", type=int, nargs="+", default=[3])
    parser.add_argument("--texts", nargs="+", default=["edit", "quotes", "prose", "random"])
    sys.exit(gpu_command(parser, main))
