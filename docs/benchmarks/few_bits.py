"""Products and attention of Qwen3-8B's layers in 16 and in 8 bits, on a GPU.

    python -m docs.benchmarks.few_bits
    python -m docs.benchmarks.few_bits --draw RECORD docs/images/m5_eight_bits.svg

First each product is compared with one in fp32 of the numbers that it has. Then the four products
of a layer are timed, for 1 to 1,024 rows, times 36 layers. Weights of three layers take turns, more
than the L2 cache holds. The limits are reading the weights, and multiplying: both are measured.
int8 is computed by the kernels for any GPU: Hopper has its own for more than a few rows.

`--draw` draws the products of a record, and needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from m5_kernels.decoder.linear import LinearMethod
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear
from m5_kernels.extras.quantization.fp8_linear import Fp8Linear
from m5_kernels.extras.quantization.fp8_rows import RoundedRows, ScaledRows
from m5_kernels.extras.quantization.int8_linear import int8_linear
from m5_kernels.extras.quantization.int8_method import Int8Linear
from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode
from m5_kernels.kernels.launch import Launch
from m5_kernels.tools.measure import Ceilings, PagedBatch, median_us, relative_error
from milestone_llm.consoles import console
from milestone_llm.lab.bench.report import table

SHAPES = {"QKV": (6144, 4096), "output": (4096, 4096), "gate": (24576, 4096), "down": (4096, 12288)}
NUM_LAYERS, NUM_TURNS = 36, 3
NUM_WEIGHTS = NUM_LAYERS * sum(out_size * in_size for out_size, in_size in SHAPES.values())
COLORS = ("#4878a8", "#c08030", "#4a9060")
ROWS = (1, 2, 8, 32, 64, 128, 256, 512, 1024)
BATCHES = ((1, 600), (256, 700), (64, 4096), (8, 32768))
MOST_ERROR = {"bf16": 0.005, "int8": 0.02, "fp8": 0.06}
E4M3 = torch.float8_e4m3fn


def int8_of_any_gpu(
    hidden: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    is_gated: bool,
    launch: Launch,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` by the kernels that need no Hopper."""
    return int8_linear(hidden, weight, bias, launch=launch)


def layers(method: LinearMethod) -> list[dict[str, Any]]:
    """Return the weights of three layers, with the same random numbers for each method."""
    torch.manual_seed(0)
    made = []
    for _ in range(NUM_TURNS):
        weights = {}
        for name, (out_size, in_size) in SHAPES.items():
            exact = torch.empty(out_size, in_size, device="cuda", dtype=torch.bfloat16)
            exact.normal_(std=in_size**-0.5)
            weight = method.create(out_size, in_size, exact.dtype, exact.device)
            (part,) = weight.split([out_size])
            method.load(part, exact, (slice(None), slice(None)), exact.dtype)
            weights[name] = weight
        made.append(weights)
    return made


def products(method: LinearMethod, weights: dict[str, Any], num_rows: int) -> list[Callable]:
    """Return the launches of a layer's products. Rows in e4m3 are rounded before."""
    launches: list[Callable] = []
    for name, (_, in_size) in SHAPES.items():
        hidden: Any = torch.randn(num_rows, in_size, device="cuda", dtype=torch.bfloat16)
        if isinstance(method, Fp8Linear) and num_rows > 1:
            hidden = RoundedRows.round(hidden)
        launches.append(partial(method.apply, hidden, weights[name]))
    return launches


def check(name: str, method: LinearMethod, weights: dict[str, Any]) -> None:
    """Compare products with those of exact weights.

    Raises:
        RuntimeError: one is further away than its format explains.
    """
    exact = layers(LinearMethod())[0]
    for num_rows in (1, 33):
        for (label, (_, in_size)), weight in zip(SHAPES.items(), weights.values(), strict=True):
            hidden = torch.randn(num_rows, in_size, device="cuda", dtype=torch.bfloat16)
            found = method.apply(hidden, weight)
            if isinstance(found, ScaledRows):
                found = found.multiplied()
            error = relative_error(found, hidden.float() @ exact[label].float().T)
            if not error < MOST_ERROR[name]:
                raise RuntimeError(f"{name}, {label}, {num_rows} rows: relative error {error}")


def measure_products(methods: dict[str, LinearMethod]) -> dict[str, list[float]]:
    """Return the milliseconds of 36 layers, for each number of rows."""
    found: dict[str, list[float]] = {}
    for name, method in methods.items():
        turns = layers(method)
        check(name, method, turns[0])
        found[name] = []
        for num_rows in ROWS:
            launches = [each for turn in turns for each in products(method, turn, num_rows)]
            found[name].append(median_us(launches) * len(SHAPES) * NUM_LAYERS / 1e3)
        del turns
        torch.cuda.empty_cache()
    return found


def measure_attention() -> list[list[str]]:
    """Return rows of a table: a layer's `flash_decode` with keys and values in both formats."""
    rows = []
    for num_seqs, length in BATCHES:
        batch = PagedBatch.random([length] * num_seqs, [1] * num_seqs, num_q_heads=32)
        query, keys, values, *rest = batch.decode_inputs
        took = []
        for dtype in (torch.bfloat16, E4M3):
            inputs = query, keys.to(dtype), values.to(dtype), *rest
            workspace = DecodeWorkspace.allocate(num_seqs, 32, 8, 128, dtype, "cuda")
            took.append(median_us([partial(flash_decode, *inputs, workspace=workspace)]))
        name = f"{num_seqs} x {length:,}"
        rows.append([name, *(f"{us:.1f}" for us in took), f"{took[0] / took[1]:.2f}x"])
    return rows


def limit_ms(bits: int, num_rows: int, ceilings: Ceilings) -> float:
    """Return the least milliseconds of 36 layers' products."""
    reading = NUM_WEIGHTS * bits / 8 / ceilings.read_gbps / 1e6
    return max(reading, 2 * NUM_WEIGHTS * num_rows / ceilings.matmul_tflops / 1e9)


def draw(record: str, path: str) -> None:
    """Draw the products a second of a record's table over the rows, and the two limits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    lines = [line.split() for line in Path(record).read_text(encoding="utf-8").splitlines()]
    found = [list(map(float, line[:6])) for line in lines if len(line) == 7 and line[0].isdigit()]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "few bits"}
    figure, axes = plt.subplots(figsize=(7.5, 4.6))
    num_products = 2 * NUM_WEIGHTS / 1e9  # of a row
    all_rows = [line[0] for line in found]
    rates = [[num_products * line[0] / line[i] for line in found] for i in range(1, 6)]
    for rate, style, name in zip(rates[3:], ("-", "--"), ("16 bits", "8 bits"), strict=True):
        axes.plot(all_rows, rate, style, color="#888888", linewidth=1)
        axes.text(all_rows[-1], rate[-1] * 1.12, f"limit of {name}", ha="right", size=9)
    names = "bf16", "int8, any GPU", "fp8"
    for rate, color, marker, name in zip(rates, COLORS, "os^", names, strict=False):
        axes.plot(all_rows, rate, marker, color=color, markersize=6, label=name)
    axes.set(xscale="log", yscale="log", xlabel="rows of a step", xticks=all_rows)
    axes.set_title("Products of Qwen3-8B's layers, TFLOP/s", loc="left", size=11, weight="bold")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.0f}"))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Check, time, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", nargs=2, metavar=("RECORD", "SVG"), help="draw a record")
    args = parser.parse_args(arguments)
    if args.draw:
        draw(*args.draw)
        return
    methods = {
        "bf16": FewRowsLinear.on(torch.device("cuda")),
        "int8": Int8Linear(linear=int8_of_any_gpu),
        "fp8": Fp8Linear(is_fused=True),
    }
    ceilings = {16: Ceilings.measure(), 8: Ceilings.measure(in_fp8=True)}
    for bits, limits in ceilings.items():
        console.print(
            f"{torch.cuda.get_device_name()}, {bits} bits: reads at {limits.read_gbps:,.0f} GB/s, "
            f"products at {limits.matmul_tflops:,.0f} TFLOP/s"
        )
    found = measure_products(methods)
    rows = [
        [
            str(num_rows),
            *(f"{found[name][i]:.2f}" for name in methods),
            *(f"{limit_ms(bits, num_rows, ceilings[bits]):.2f}" for bits in (16, 8)),
            f"{found['bf16'][i] / found['fp8'][i]:.2f}x",
        ]
        for i, num_rows in enumerate(ROWS)
    ]
    headings = ["rows", "bf16", "int8", "fp8", "limit, 16", "limit, 8", "fp8 gains"]
    console.print(table("Products of 36 layers, ms", headings, rows))
    headings = ["sequences x tokens", "bf16", "e4m3", "e4m3 gains"]
    console.print(table("Attention of a layer, us", headings, measure_attention()))


if __name__ == "__main__":
    main()
