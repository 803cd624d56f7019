"""How much guesses bring on a GPU, on texts that repeat and on one that does not.

    python -m docs.questions.spec_speed random-qwen3-0.6b 1 4 16 64

What comes out is forced: after sampling, each token is replaced by that of a given text at the same
place. So guesses come true as for a model that writes the text, at the cost of the real one. Tokens
are words, blanks and signs. The numbers at the end are requests at one time.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from m5_kernels import LLMEngine, SamplingParams

ROOT = Path(__file__).parents[2]
NUM_OUT, MOST_ROWS, ROUNDS = 512, 16, 2


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
    sample = engine.runner.sampler.sample

    def forced(logits: Any, rows: Any, positions: torch.Tensor, needs: Any) -> torch.Tensor:
        tokens = sample(logits, rows, positions, needs)
        said = script[positions.clamp(0, len(script) - 1)]
        return torch.where(tokens >= 0, said, tokens)

    engine.runner.sampler.sample = forced


def rate(engine: Any, prompt: list[int], output: list[int], count: int) -> float:
    """Output tokens a second of so many requests, from the first token on."""
    params = SamplingParams(temperature=0, max_tokens=len(output), ignore_eos=True)
    for number in range(count):  # the first token differs: no prefix is found
        engine.add_request([number + 1, *prompt], params)
    first = None
    while engine.has_unfinished_requests():
        for done in engine.step():
            first = first or time.perf_counter()
            assert not done.finished or done.token_ids == output
    return count * (len(output) - 1) / (time.perf_counter() - (first or 0.0))


def main(model: str, counts: list[int]) -> None:
    """Measure each text without guesses and with them, in turns, and print a line each."""
    engine = LLMEngine(
        model,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=max(counts),
        kv_cache_tokens=160_000,
        speculation="ngram",
        speculation_max_num_seqs=MOST_ROWS,
    )
    script = torch.zeros(NUM_OUT, dtype=torch.int32, device="cuda")
    force(engine, script)  # before a graph is captured
    engine.warm_up()
    for name, (prompt, output) in texts().items():
        script[: len(output)] = torch.tensor(output, dtype=torch.int32)
        for count in counts if name in ("edit", "random") else counts[:1]:
            rates: dict[int, list[float]] = {0: [], MOST_ROWS: []}
            for _ in range(ROUNDS):
                for most, found in rates.items():
                    engine.scheduler.speculation.max_rows = most
                    engine.reset_prefix_cache()
                    found.append(rate(engine, prompt, output, count))
            without, with_guesses = (statistics.median(found) for found in rates.values())
            print(
                f"{name:7} {count:3} requests: {without:8,.0f} tok/s without guesses, "
                f"{with_guesses:8,.0f} with, {with_guesses / without:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]] or [1])
