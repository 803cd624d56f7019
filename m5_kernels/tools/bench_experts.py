"""Time the kernels of experts: `python -m m5_kernels.tools.bench_experts`

One layer of Qwen3-30B-A3B's shape in bf16: 128 experts of 768 neurons, 8 a token. For each number
of tokens, all tiles of both products, with registers and spills, next to the time in which the
weights of the experts that were met can be read, or the products computed, and next to torch's own
grouped product. Then the whole MLP of a layer with the tiles that an engine takes. Inputs rotate,
so that no launch finds its weights in the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear
from m5_kernels.extras.experts import grouped
from m5_kernels.extras.experts.config import experts_config
from m5_kernels.extras.experts.grouped import combine, grouped_down, grouped_gate_up
from m5_kernels.extras.experts.moe_mlp import MoEMLP
from m5_kernels.extras.experts.routing import route
from m5_kernels.extras.experts.sorting import sort_by_expert
from m5_kernels.extras.experts.tiles import GroupedTile, grouped_tiles
from m5_kernels.kernels.launch import Launch
from milestone_llm.cli import Formatter, add_options, run_command
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.report import table
from milestone_llm.models.shapes import shape_config

from .measure import Ceilings, median_us

COUNTS = (1, 2, 8, 32, 64, 128, 256, 512, 2048, 16_384)
TILES: dict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    16: (
        [(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (128, 64, 8, 3),
         (128, 64, 4, 2), (64, 256, 4, 2), (32, 128, 4, 3)],
        [(64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (128, 128, 4, 3),
         (128, 128, 8, 3), (64, 256, 4, 2), (256, 64, 8, 3)],
    ),
    32: (
        [(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (128, 64, 8, 3)],
        [(64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4), (128, 128, 4, 3), (256, 64, 8, 3)],
    ),
    64: (
        [(64, 128, 4, 2), (64, 64, 4, 4), (64, 64, 4, 5), (128, 64, 8, 3)],
        [(64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3), (128, 64, 8, 4)],
    ),
    128: (
        [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4)],
        [(64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4), (256, 64, 8, 3), (128, 128, 8, 3)],
    ),
}  # fmt: skip
"""By rows: columns, depth, warps and stages of gate and up, and of down."""


def rows_for(num_tokens: int) -> list[int]:
    """Return the heights of tiles that are worth a try."""
    mean = num_tokens * 8 / 128
    return [rows for rows in TILES if max(16, mean / 2) <= rows <= max(16, 4 * mean)] or [128]


@dataclass
class Layer:
    """An MLP of random experts, and steps of random tokens for it."""

    mlp: MoEMLP
    linear: FewRowsLinear

    @classmethod
    def random(cls, device: torch.device) -> Layer:
        """Return an MLP of Qwen3-30B-A3B's shape."""
        config = shape_config("qwen3-30b-a3b")
        linear = FewRowsLinear.on(device)
        mlp = MoEMLP.create(
            0, experts_config(config), DecoderConfig.from_hf(config), linear, torch.bfloat16, device
        )
        for weight in (mlp.router, mlp.gate_up, mlp.down):
            weight.normal_(std=0.02)
        return cls(mlp, linear)

    def steps(self, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return hidden states and router logits of several steps."""
        num = 16 if num_tokens <= 8 else 4 if num_tokens <= 2048 else 1
        size = self.mlp.gate_up.shape[2]
        hidden = [
            torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16) for _ in range(num)
        ]
        return [(each, each @ self.mlp.router.T) for each in hidden]

    def limit_us(self, topk_ids: torch.Tensor, ceilings: Ceilings) -> tuple[float, float]:
        """Return the least microseconds of both products: of reading, or of computing."""
        met = len(topk_ids.unique())
        least = []
        for weight in (self.mlp.gate_up, self.mlp.down):
            reading = met * weight[0].nbytes / ceilings.read_gbps / 1e3
            computing = 2 * topk_ids.numel() * weight[0].numel() / ceilings.matmul_tflops / 1e6
            least.append(max(reading, computing))
        return least[0], least[1]


class Resources:
    """Launches kernels, and keeps registers and spills of the last one."""

    def __init__(self) -> None:
        self.text = ""

    def of(self, launch: Callable[[], object], module: Any, name: str) -> str:
        """Launch once, and return what the compiler used for the kernel."""
        kernel, found = getattr(module, name), []

        class Watched:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
                def run(*args: Any, **options: Any) -> object:
                    found.append(kernel[grid](*args, **options))
                    return found[-1]

                return run

        setattr(module, name, Watched())
        try:
            launch()
        finally:
            setattr(module, name, kernel)
        return f"{found[0].n_regs}/{found[0].n_spills}"


def time_products(layer: Layer, num_tokens: int, ceilings: Ceilings) -> None:
    """Print all tiles of both products for so many tokens."""
    mlp, routing = layer.mlp, layer.mlp.config.routing
    steps = layer.steps(num_tokens)
    routed = [route(logits, routing) for _, logits in steps]
    limits = layer.limit_us(routed[0][0], ceilings)
    launch = Launch.on(torch.device("cuda"))
    resources = Resources()

    def cases(rows: int) -> list[tuple[str, GroupedTile, list[Callable[[], object]]]]:
        pairs = [sort_by_expert(ids, routing.num_experts, rows) for ids, _ in routed]
        neurons = torch.randn(
            num_tokens * routing.top_k, mlp.down.shape[2], device="cuda", dtype=torch.bfloat16
        )
        found: list[tuple[str, GroupedTile, list[Callable[[], object]]]] = []
        for tile in (GroupedTile(rows, *each) for each in TILES[rows][0]):
            found.append(
                ("gate, up", tile, [
                    partial(grouped_gate_up, hidden, mlp.gate_up, own, routing.top_k, tile, launch)
                    for (hidden, _), own in zip(steps, pairs, strict=True)
                ])
            )  # fmt: skip
        for tile in (GroupedTile(rows, *each) for each in TILES[rows][1]):
            found.append(
                ("down", tile, [
                    partial(grouped_down, neurons, mlp.down, own, weights, tile, launch)
                    for own, (_, weights) in zip(pairs, routed, strict=True)
                ])
            )  # fmt: skip
        return found

    results = []
    for rows in rows_for(num_tokens):
        for name, tile, launches in cases(rows):
            try:
                used = resources.of(launches[0], grouped, "_grouped_kernel")
                us = median_us(launches)
            except Exception as error:  # a tile that does not fit
                console.print(name, tile, str(error).splitlines()[0][:80])
                continue
            results.append((name, us, tile, used))
    lines = []
    for name, limit in zip(("gate, up", "down"), limits, strict=True):
        own = sorted((each for each in results if each[0] == name), key=lambda each: each[1])
        for _, us, tile, used in own:
            text = " ".join(map(str, tile))
            lines.append([name, text, used, f"{us:.1f}", f"{limit:.1f}", f"{limit / us:.0%}"])
    for name, us, limit in library(layer, steps, [ids for ids, _ in routed], limits):
        lines.append([name, "torch", "", f"{us:.1f}", f"{limit:.1f}", f"{limit / us:.0%}"])
    met = len(routed[0][0].unique())
    heads = ["product", "rows columns depth warps stages", "registers/spills", "us", "limit", ""]
    console.print("", table(f"{num_tokens} tokens, {met} experts met", heads, lines))


def library(
    layer: Layer,
    steps: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ids: Sequence[torch.Tensor],
    limits: tuple[float, float],
) -> list[tuple[str, float, float]]:
    """Return the times of torch's grouped product, without the sorting before it."""
    mlp, found = layer.mlp, []
    for name, weight, limit in zip(
        ("gate, up", "down"), (mlp.gate_up, mlp.down), limits, strict=True
    ):
        launches: list[Callable[[], object]] = []
        for own in ids:
            ends = own.flatten().long().bincount(minlength=len(weight)).cumsum(0).int()
            states = torch.randn(own.numel(), weight.shape[2], device="cuda", dtype=torch.bfloat16)
            launches.append(partial(torch._grouped_mm, states, weight.transpose(1, 2), offs=ends))
        found.append((name, median_us(launches), limit))
    return found


def time_small_kernels(layer: Layer) -> None:
    """Print router, routing, sorting and combining."""
    mlp, routing = layer.mlp, layer.mlp.config.routing
    lines = []
    for num_tokens in COUNTS:
        steps = layer.steps(num_tokens)
        routed = [route(logits, routing) for _, logits in steps]
        rows = grouped_tiles(num_tokens * 8, 128, torch.bfloat16, torch.device("cuda")).gate_up.rows
        outputs = torch.randn(num_tokens * 8, 2048, device="cuda", dtype=torch.bfloat16)
        launches: list[list[Callable[[], object]]] = [
            [partial(layer.linear.apply, hidden, mlp.router) for hidden, _ in steps],
            [partial(route, logits, routing) for _, logits in steps],
            [partial(sort_by_expert, ids, 128, rows) for ids, _ in routed],
            [partial(combine, outputs, 8)],
        ]
        lines.append([f"{num_tokens:,}", *(f"{median_us(each):.1f}" for each in launches)])
    console.print("", table("", ["tokens, us", "router", "route", "sort", "combine"], lines))


def time_layers(layer: Layer, ceilings: Ceilings) -> None:
    """Print the MLP of a layer as an engine launches it."""
    launch, lines = Launch.on(torch.device("cuda")), []
    for num_tokens in COUNTS:
        steps = layer.steps(num_tokens)
        limit = sum(layer.limit_us(route(steps[0][1], layer.mlp.config.routing)[0], ceilings))
        us = median_us([partial(layer.mlp, hidden, layer.linear, launch) for hidden, _ in steps])
        lines.append([f"{num_tokens:,}", f"{us:.1f}", f"{limit:.1f}", f"{limit / us:.0%}"])
    console.print("", table("", ["tokens, whole MLP", "us", "limit", ""], lines))


def measure(args: argparse.Namespace) -> None:
    """Print all tables.

    Raises:
        InputError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise InputError("this measures an NVIDIA GPU, and torch sees none here")
    with torch.inference_mode():
        ceilings = Ceilings.measure()
        console.print(str(ceilings), soft_wrap=True)
        layer = Layer.random(torch.device("cuda"))
        for num_tokens in COUNTS:
            time_products(layer, num_tokens, ceilings)
        time_small_kernels(layer)
        time_layers(layer, ceilings)


def main() -> int:
    """Run the command line. Returns the exit status."""
    name = "python -m m5_kernels.tools.bench_experts"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    add_options(parser, "threads")
    return run_command(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
