"""The steps of tensor parallelism's course: cut the weights, add up the parts, two processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from docs.questions import m0_transformer
from docs.questions import m5_cut_model as ours
from exercises.build.check import Parts, Wrong, step
from exercises.build.guarded import compare_numbers, like, random_tensor
from exercises.build.skeleton import File, Todo

MILESTONE, FILE, SIZE = "docs.questions", "m5_cut_model", 2
TITLE = "tensor parallelism: one model, two processes (1 to 2 hours)"
DONE = """All of it. Your file is a program, too:

  python -m exercises.build.tensor_parallel.m5_cut_model

Ours is docs/questions/m5_cut_model.py. m5_kernels/extras/tensor_parallel/ does the same with M5's
kernels: rank_shard.py cuts, collectives.py adds up, before the next norm."""

FILES = [
    File(
        "docs/questions/m5_cut_model.py",
        {
            "part_of": Todo(
                "step 1: q, k, v, gate and up make columns of a result: cut their outputs. o and "
                "down add up their inputs: cut those. Others stay whole. weight.chunk(size, dim)",
                first=1,
            ),
            "layer": "step 2: as M0's layer, with an all-reduce where parts of a sum become the "
            "sum. The residual is whole already.",
            "all_reduce": "step 3: dist.all_reduce adds up in place, and returns None.",
        },
        """You write what raises NotImplementedError:

    python -m exercises.build tensor_parallel         what to write next, and what is wrong with it

`attention` and `mlp` are M0's. They take as many heads and neurons as the weights have: with a
rank's parts they compute a part.""",
    )
]


def tiny_layer() -> tuple[dict[str, torch.Tensor], Any]:
    """The weights of a layer, and the config: 4 query heads, 2 KV heads of 16, 128 neurons."""
    from milestone_llm.models.tiny_models import build_tiny_model

    model = m0_transformer.Model(build_tiny_model("llama"))
    return model.layers[0], model.config


@step("columns and rows", f"{FILE}.py", needs_model=True)
def cut(parts: Parts) -> None:
    """`part_of` gives a rank its part of a weight. A weight is stored as `[output, input]`. A rank
    has whole heads, those of a KV head with it, and its neurons; what it makes of them goes into
    `o_proj` and `down_proj`, which give a part of every sum."""
    weights, _ = tiny_layer()
    for name, weight in weights.items():
        for rank in range(SIZE):
            got = parts.module(FILE).part_of(name, weight, rank, SIZE)
            wanted = ours.part_of(name, weight, rank, SIZE)
            case = f"part_of({name!r}, weight {list(weight.shape)}, rank {rank} of {SIZE})"
            if got.shape != wanted.shape:
                why = "That is the other dimension: [output, input]. "
                why *= got.dim() == 2 and got.numel() == wanted.numel()
                raise Wrong(
                    f"{case}\nIts shape is {list(got.shape)}, and should be {list(wanted.shape)}. "
                    f"{why}By column: outputs are cut. By row: inputs. Norms are whole."
                )
            taken = [(like(weight[rank::SIZE]), "That is every second row. Heads are neighbours: "
                      "rank 0 has the first half.")] if wanted.dim() == 2 else []  # fmt: skip
            compare_numbers(case, got, wanted, taken)


def in_threads(run: Any) -> list[Any]:
    """Return what `run(rank, all_reduce)` returns for each rank. Threads stand in for processes.

    Raises:
        Wrong: one rank waits for a sum, and the other has ended.
    """
    barrier, given, results = threading.Barrier(SIZE, timeout=5), [None] * SIZE, [None] * SIZE
    errors: list[Exception] = []

    def all_reduce(rank: int, part: torch.Tensor) -> torch.Tensor:
        given[rank] = part
        barrier.wait()
        total = sum(given[1:], given[0])
        barrier.wait()
        return total

    def work(rank: int) -> None:
        try:
            results[rank] = run(rank, lambda part: all_reduce(rank, part))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return results


@step("a layer of two ranks", f"{FILE}.py", needs_model=True)
def layers(parts: Parts) -> None:
    """`layer` computes a rank's part of each half, and `all_reduce` adds up the parts of all ranks.
    x goes in whole, and comes out whole, on every rank."""
    w, config = tiny_layer()
    x, counts = random_tensor(3, 64), [0] * SIZE
    own = [
        {name: ours.part_of(name, each, rank, SIZE) for name, each in w.items()}
        for rank in range(SIZE)
    ]

    def run(rank: int, all_reduce: Any) -> Any:
        def counted(part: torch.Tensor) -> torch.Tensor:
            counts[rank] += 1
            return all_reduce(part)

        return parts.module(FILE).layer(x.clone(), own[rank], None, config, counted)

    results = in_threads(run)
    wanted, cache = m0_transformer.layer(x, w, None, config)
    case = f"layer, {SIZE} ranks, 3 tokens; all-reduces: {counts[0]}"
    for rank, (got, own_cache) in enumerate(results):
        no_sum, _ = ours.layer(x, own[rank], None, config, lambda part: part)
        causes = [
            (like(no_sum), "The parts of this rank alone: where does the other's come in?"),
            (
                lambda out: counts[rank] < 2,  # noqa: B023
                "A layer needs two all-reduces: the norm before the MLP needs the whole x.",
            ),
            (
                lambda out: counts[rank] == 2,  # noqa: B023
                "Two all-reduces are right. Do they add up parts alone? x is whole on every rank: "
                "in the sum it would count twice.",
            ),
            (
                lambda out: True,
                "Two all-reduces are enough: one after o_proj, one after down_proj.",
            ),
        ]
        compare_numbers(f"{case}; rank {rank}", got, wanted, causes)
        heads = slice(rank, rank + 1)
        compare_numbers(f"{case}; keys that rank {rank} keeps", own_cache[0], cache[0][heads], [])
    if counts != [2] * SIZE:
        raise Wrong(f"{case}\nRight, but two are enough, and each costs time on GPUs.")


@step("two processes give the tokens of one", f"{FILE}.py", needs_model=True)
def processes(parts: Parts) -> None:
    """`all_reduce` asks torch.distributed, which here goes through gloo, on GPUs through NCCL. Then
    two processes generate, each with its half of a tiny model."""
    mine, prompt = parts.module(FILE), [5, 9, 33, 7, 120]
    with tempfile.TemporaryDirectory() as folder:  # here first, where an error keeps its line
        alone = mine.generate(0, 1, str(Path(folder, "meeting")), prompt)
    try:
        both = ours.generate_with(SIZE, prompt, mine.generate)
    except multiprocessing.TimeoutError:
        raise Wrong("No end after a minute: do both ranks call all_reduce equally often?") from None
    for rank, tokens in enumerate(both):
        if tokens != alone:
            raise Wrong(
                f"prompt {prompt}\nrank {rank} of {SIZE}  {tokens}\none process  {alone}\n"
                "With one process there is nothing to add up. Does all_reduce return the sum?"
            )
