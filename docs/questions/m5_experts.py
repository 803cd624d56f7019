"""What a step reads if each token meets 8 of 128 experts: `python -m docs.questions.m5_experts`

The shape is Qwen3-30B-A3B's, in bfloat16. Tokens choose at random, each expert as likely as the
others: a real router has favourites, and then a batch meets fewer. With `-o PATH.png` it draws.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

from m5_kernels.extras.experts.sorting import sort_by_expert_torch
from m5_kernels.extras.experts.tiles import grouped_tiles
from milestone_llm.lab.plots.picture import set_titles, write_picture
from milestone_llm.models.shapes import shape_config

SHAPE = shape_config("qwen3-30b-a3b")
E, TOP_K, LAYERS = SHAPE.num_experts, SHAPE.num_experts_per_tok, SHAPE.num_hidden_layers
EXPERT = 3 * SHAPE.hidden_size * SHAPE.moe_intermediate_size * 2
"""Bytes of an expert: gate, up and down."""
HEADS = SHAPE.num_attention_heads + SHAPE.num_key_value_heads
REST = LAYERS * 2 * HEADS * SHAPE.head_dim * SHAPE.hidden_size * 2
REST += SHAPE.vocab_size * SHAPE.hidden_size * 2
"""Bytes that every step reads: attention of all layers, and the LM head."""


def routed(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.rand(num_rows, E, generator=generator).topk(TOP_K, -1)[1]


def expected_met(num_rows: float) -> float:
    """Return the mean number of experts that a batch meets: all but those that each row misses."""
    return E * (1 - (1 - TOP_K / E) ** num_rows)


def gigabytes(met: float) -> float:
    return (LAYERS * met * EXPERT + REST) / 1e9


def show() -> None:
    print(" rows  experts met  GB read  GB a row  largest expert  rows of tiles in use")
    for rows in (1, 8, 64, 256):
        ids = routed(rows)
        counts = ids.flatten().bincount(minlength=E)
        met = int((counts > 0).sum())
        tile = grouped_tiles(ids.numel(), E, torch.bfloat16, ids.device).gate_up
        tiles = sort_by_expert_torch(ids, E, tile.rows).tile_experts
        used = ids.numel() / (int((tiles >= 0).sum()) * tile.rows)
        read = gigabytes(met)
        share = int(counts.max()) / ids.numel()
        print(f"{rows:5}  {met:11}  {read:7.1f}  {read / rows:8.2f}  {share:14.1%}  {used:20.0%}")


def draw() -> Figure:
    rows = [2 ** (power / 4) for power in range(41)]
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    whole, few = gigabytes(E), gigabytes(TOP_K)
    lines = {
        "dense, of 30 billion weights": (whole for _ in rows),
        "dense, of 3 billion": (few for _ in rows),
        "8 of 128 experts a token": (gigabytes(expected_met(each)) for each in rows),
    }
    styles = (("0.6", ":"), ("0.4", "--"), ("#d55e00", "-"))
    for (name, values), (colour, dashes) in zip(lines.items(), styles, strict=True):
        axes.plot(rows, list(values), color=colour, linestyle=dashes, label=name)
    for each in (1, 8, 64):
        met = expected_met(each)
        axes.plot(each, gigabytes(met), "o", color="#d55e00")
        axes.annotate(
            f"{each}: {met:.0f} experts",
            (each, gigabytes(met)),
            (6, -12),
            textcoords="offset points",
        )
    axes.set_xscale("log", base=2)
    ticks = [1, 4, 16, 64, 256, 1024]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(0, 70)
    axes.set_xlabel("rows in a step")
    axes.set_ylabel("GB of weights that the step reads")
    axes.grid(color="0.9")
    axes.legend(frameon=False, loc="center right")
    set_titles(
        axes,
        "One row reads a small model, sixty a large one",
        "Each row brings experts that no other row of the step has met",
    )
    return figure


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", type=Path, metavar="PATH.png")
path = parser.parse_args().o
if path:
    print(write_picture(path, "picture", draw))
else:
    show()
