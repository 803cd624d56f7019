"""How much guesses bring on a CPU: SmolLM2 in M4, two texts that repeat and one that does not.

    python -m docs.questions.spec_cpu --threads 1

The model writes them itself. Times begin with the first token, and rounds with guesses and without
take turns, each twice the other way around: other programs slow both down.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from m4_prefix_chunked import LLMEngine, SamplingParams
from m4_prefix_chunked.tools.demo_guesses import CODE

PASSAGE = """\
The harbour of the town is small. Nine boats lie there in winter, and in summer thirty. The oldest
belongs to a widow, who paints it green each spring and has never sailed it. The fish market opens
at five, when the gulls are already waiting on the roof of the customs house. A bell is rung when
fog comes in. Nobody has counted how often that is, but the keeper of the bell, who is also the
baker, says that bread is better on such days, for he is up before the bakers of other towns."""
QUESTION = "Describe a harbour in winter."
ROUNDS, NUM_OUT = 4, 64


def prompts(tokenizer: Any) -> dict[str, list[int]]:
    """Token ids by name: a passage that begins again, a file to edit, a question."""

    def asked(text: str) -> list[int]:
        turn = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    again = tokenizer(f"{PASSAGE}\n\n{PASSAGE[:80]}")["input_ids"]
    return {"copy": again, "edit": asked(CODE), "answer": asked(QUESTION)}


def run(engine: Any, prompt: list[int], num_guesses: int) -> tuple[float, int, list[int]]:
    """Seconds and steps after the first token, and the tokens."""
    engine.reset_prefix_cache()
    speculation = engine.scheduler.speculation
    speculation.num_tokens, speculation.max_rows = num_guesses, int(num_guesses > 0)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    engine.add_request(prompt, params)
    (output,) = engine.step()
    start, num_steps = time.perf_counter(), 0
    while not output.finished:
        (output,) = engine.step()
        num_steps += 1
    return time.perf_counter() - start, num_steps, output.token_ids


def main(num_threads: int | None) -> None:
    """Measure each text, and print a line each."""
    if num_threads:
        torch.set_num_threads(num_threads)
    engine = LLMEngine(max_num_seqs=1, max_model_len=512, speculation="ngram")
    engine.warm_up()
    arms = 0, 3, 7
    print(f"{torch.get_num_threads()} threads, {NUM_OUT} tokens; medians of {ROUNDS} rounds")
    for name, prompt in prompts(engine.tokenizer).items():
        found: dict[int, list[float]] = {arm: [] for arm in arms}
        steps, tokens = {}, {}
        for number in range(ROUNDS):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                seconds, steps[arm], tokens[arm] = run(engine, prompt, arm)
                found[arm].append(seconds)
        assert tokens[0] == tokens[3] == tokens[7]
        line = f"{name:6} no guesses: {statistics.median(found[0]):5.2f} s, {steps[0]} steps"
        for arm in arms[1:]:
            ratios = [a / b for a, b in zip(found[0], found[arm], strict=True)]
            line += (
                f" | {arm} guesses: {statistics.median(found[arm]):5.2f} s, {steps[arm]} steps, "
                f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m docs.questions.spec_cpu")
    parser.add_argument("--threads", type=int)
    main(parser.parse_args().threads)
