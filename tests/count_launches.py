"""What a step of M5 launches on a GPU, by kernel: `python tests/count_launches.py`.

Counted on a device that stands in for one (`cuda_on_cpu`), so no GPU is needed. A step is counted
as it is replayed from its graph, and as it is launched without. The model has two layers. Early
starts and kernels for Hopper are not there, nor what a larger model would have for its size.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import m5_kernels
from cuda_on_cpu import cuda_on_cpu
from m1_single import SamplingParams
from milestone_llm.models.tiny_models import build_tiny_model

STEPS = {"one row": (1, []), "4 rows": (4, []), "3 rows and a chunk": (3, [*range(1, 31)])}
"""Rows with one token, and the prompt that is in the step beside them."""


def launches_of_step(
    num_rows: int, prompt: list[int], enforce_eager: bool, dtype: str, num_layers: int
) -> Counter[str]:
    """By name, of a step in which `num_rows` requests decode, with a prompt beside them or not."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48}
    model = build_tiny_model("qwen3", num_hidden_layers=num_layers, **sizes)
    with cuda_on_cpu() as machine:
        engine = m5_kernels.LLMEngine(
            model.to(getattr(torch, dtype)).to("cuda:0"),
            max_num_seqs=4,
            max_model_len=64,
            block_size=4,
            kv_cache_tokens=256,
            max_num_batched_tokens=64,
            enforce_eager=enforce_eager,
        )
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for row in range(num_rows):
            engine.add_request([5 + row, 9, 33], greedy)
        for _ in range(3):  # prompts, and steps that are launched before the last one's tokens came
            engine.step()
        if prompt:
            engine.add_request(prompt, greedy)
        before, num_replays = machine.launches.copy(), machine.num_replays
        engine.step()
        assert machine.num_replays == num_replays + (not enforce_eager)
        return +(machine.launches - before)


def main() -> None:
    """Print them."""
    for dtype in ("float32", "bfloat16"):
        for step, (num_rows, prompt) in STEPS.items():
            for enforce_eager in (False, True):
                launches = launches_of_step(num_rows, prompt, enforce_eager, dtype, num_layers=2)
                way = "eager" if enforce_eager else "replayed"
                print(f"{dtype}, {step}, {way}: {launches.total()} launches")
                for name, number in sorted(launches.items()):
                    print(f"  {number:4} {name}")


if __name__ == "__main__":
    main()
