"""M0's model, cut over two processes on a CPU: columns, then rows, then one all-reduce.

Each process keeps half of the heads and half of the neurons of every layer. Embedding and LM head
are whole on both. Run alone, two processes generate the tokens of one.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from docs.questions.m0_transformer import Cache, Model, Weights, attention, mlp, rms_norm


def part_of(name: str, weight: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of a weight that one of `size` ranks keeps. A weight is stored as `[output,
    input]`; its name is like "mlp.up_proj.weight"."""
    matrix = name.split(".")[-2]
    if matrix in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):  # by column
        return weight.chunk(size, 0)[rank]
    if matrix in ("o_proj", "down_proj"):  # by row
        return weight.chunk(size, 1)[rank]
    return weight


def layer(
    x: Tensor, w: Weights, cache: Cache | None, config, all_reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Cache]:
    """Compute new tokens `[num_new, hidden_size]` in one layer, whole on every rank.

    Args:
        w: the rank's parts of the weights; the cache has the rank's KV heads.
        all_reduce: returns the sum of what all ranks give it.
    """
    normed = rms_norm(x, w["input_layernorm.weight"], config.rms_norm_eps)
    part, cache = attention(normed, w, cache, config)
    x = x + all_reduce(part)
    normed = rms_norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
    return x + all_reduce(mlp(normed, w)), cache


def all_reduce(part: Tensor) -> Tensor:
    """Return the sum of the parts of all processes. Each process waits for all others."""
    dist.all_reduce(part)
    return part


class RankModel(Model):
    """The model of one rank."""

    def __init__(self, checkpoint, rank: int, size: int, all_reduce) -> None:
        super().__init__(checkpoint, functools.partial(layer, all_reduce=all_reduce))
        self.layers = [
            {name: part_of(name, weight, rank, size) for name, weight in weights.items()}
            for weights in self.layers
        ]


def generate(rank: int, size: int, meeting: str, prompt: list[int]) -> list[int]:
    """Generate eight tokens with tiny-llama as one of `size` processes.

    Args:
        meeting: a file that is not there yet, at which the processes find each other.
    """
    from milestone_llm.models.tiny_models import build_tiny_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        model = RankModel(build_tiny_model("llama"), rank, size, all_reduce)
        new, caches, output = prompt, None, []
        for _ in range(8):
            logits, caches = model.forward(new, caches)
            new = [int(logits.argmax())]
            output += new
        return output
    finally:
        dist.destroy_process_group()


def generate_with(size: int, prompt: list[int], generate=generate) -> list[list[int]]:
    """Return what each of `size` processes generates.

    Raises:
        multiprocessing.TimeoutError: after a minute, as processes wait for each other.
    """
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(size) as pool:
        asked = [(rank, size, str(Path(folder, "meeting")), prompt) for rank in range(size)]
        return pool.starmap_async(generate, asked, chunksize=1).get(timeout=60)


def main() -> None:
    """Generate with two processes, then with one."""
    prompt = [5, 9, 33, 7, 120]
    for size in (2, 1):
        for rank, tokens in enumerate(generate_with(size, prompt)):
            print(f"rank {rank} of {size}  {tokens}")


if __name__ == "__main__":
    main()
