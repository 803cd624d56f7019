"""Why a batch changes the answer: `python -m docs.questions.m5_same_bits`

Eight numbers are added in bfloat16 in three orders. Then a tiny model serves twelve requests
together and each alone, with the default and with `batch_invariant=True`, and bits are compared.
"""

from __future__ import annotations

from typing import Any

import torch

from m5_kernels import LLMEngine, SamplingParams
from milestone_llm.consoles import console
from milestone_llm.lab.bench.workloads import random_tokens
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

EIGHT = [256.0, 1, 1, 1, 1, 1, 1, 1]


def added(numbers: list[float], width: int) -> tuple[float, list[str]]:
    """Add numbers in parts of `width`, from first to last, then the parts in pairs, in bfloat16.

    Returns:
        The sum, and a line for each level: its numbers.
    """
    level = torch.tensor(numbers, dtype=torch.bfloat16)
    lines = [show(level, 1)]
    parts = []
    for part in level.split(width):
        total = part[0]
        for number in part[1:]:
            total = total + number
        parts.append(total)
    level = torch.stack(parts)
    num_covered = width
    if width > 1:
        lines.append(show(level, num_covered))
    while len(level) > 1:
        level, num_covered = level[::2] + level[1::2], 2 * num_covered
        lines.append(show(level, num_covered))
    return float(level[0]), lines


def show(level: torch.Tensor, num_covered: int) -> str:
    """Return a line in which each number stands below the `num_covered` that it is the sum of."""
    return "".join(f"{number:^{6 * num_covered}.0f}" for number in level.tolist()).rstrip()


def facts(output: Any) -> list[Any]:
    """Return the tokens and log-probabilities of a request."""
    return [(each.token_ids, each.logprobs) for each in output.outputs]


def num_different(**fields: Any) -> int:
    """Serve requests together and each alone. Return how many have other bits."""
    model = build_tiny_model("qwen3")
    items = random_tokens(12, (3, 60), (4, 24), vocab_size=VOCAB_SIZE, seed=7)
    prompts = [item.prompt for item in items]
    params = [
        SamplingParams(
            temperature=0, max_tokens=item.params.max_tokens, ignore_eos=True, logprobs=1
        )
        for item in items
    ]
    limits: dict[str, Any] = {"max_model_len": 96, "device": "cpu", **fields}
    together = LLMEngine(model, max_num_batched_tokens=48, **limits).generate(prompts, params)
    alone = LLMEngine(model, enable_prefix_caching=False, **limits)
    return sum(
        facts(alone.generate([prompt], own)[0]) != facts(output)
        for prompt, own, output in zip(prompts, params, together, strict=True)
    )


def main() -> None:
    """Print the sums, then the comparison."""
    for width, name in ((8, "from first to last"), (4, "in two halves"), (1, "in pairs")):
        total, lines = added(EIGHT, width)
        console.print(f"{name}: {total:.0f}", style="bold")
        console.print("\n".join(lines) + "\n")
    console.print(f"exactly: {sum(EIGHT):.0f}\n")
    console.print(f"default: {num_different()} of 12 requests have other bits alone")
    invariant = num_different(batch_invariant=True)
    console.print(f"batch_invariant=True: {invariant} of 12 requests have other bits alone")


if __name__ == "__main__":
    main()
