"""All matrix products of a step of Qwen3-8B's shape, with weights in bfloat16 and in eight bits.

    python -m docs.questions.m5_eight_bits_products                what was measured on one H200
    python -m docs.questions.m5_eight_bits_products -o PATH.png    the same as a roofline

"At best" is reading the weights once, or multiplying, whichever takes longer.
"""

from __future__ import annotations

import argparse
import sys

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.tools.measure import Ceilings
from milestone_llm.command.cli import add_options, console, run_command
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.plots.picture import set_titles, write_picture
from milestone_llm.models.shapes import shape_config

SHAPE = "qwen3-8b"
Microseconds = dict[int, tuple[float, ...]]
"""By rows of the step: QKV, output, gate and up, down, LM head."""
BF16: Microseconds = {
    1: (15.5, 10.6, 47.5, 27.2, 284.6),
    2: (18.0, 11.2, 48.8, 27.4, 312.6),
    32: (16.1, 13.8, 50.2, 30.1, 332.9),
    64: (16.2, 12.0, 51.0, 31.9, 339.6),
    128: (16.6, 14.1, 54.7, 33.3, 338.3),
    256: (22.0, 16.9, 71.3, 43.0, 423.9),
}
INT8: Microseconds = {
    1: (9.2, 7.2, 27.7, 15.5, 141.7),
    2: (13.2, 10.5, 30.9, 19.6, 151.7),
    32: (12.3, 10.6, 32.8, 20.4, 156.0),
    64: (15.7, 15.1, 31.6, 24.8, 171.7),
    128: (19.3, 15.3, 44.1, 33.7, 238.1),
    256: (28.4, 18.8, 76.6, 47.0, 401.5),
}
"""Each kernel by itself, in graphs, with weights that no cache had. One NVIDIA H200, torch 2.11,
triton 3.6; one row of eight bits on another day. In bfloat16 the library's from 17 rows on.
This program measured them with --measure at commit 5be024f."""
CEILINGS = Ceilings(read_gbps=4474, copy_gbps=4286, matmul_tflops=703)


def matrices() -> list[tuple[int, int, int]]:
    """Output size, input size, and how many there are, in the order of the times."""
    c = DecoderConfig.from_hf(shape_config(SHAPE))
    layers, hidden, heads = len(c.windows), c.hidden_size, c.num_q_heads * c.head_dim
    return [
        ((c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim, hidden, layers),
        (hidden, heads, layers),
        (2 * c.intermediate_size, hidden, layers),
        (hidden, c.intermediate_size, layers),
        (c.vocab_size, hidden, 1),
    ]


NUM_WEIGHTS = sum(out_size * in_size * count for out_size, in_size, count in matrices())


def step_ms(microseconds: tuple[float, ...]) -> float:
    """Milliseconds of a step's products."""
    pairs = zip(microseconds, matrices(), strict=True)
    return sum(us * count for us, (_, _, count) in pairs) / 1e3


def show(args: argparse.Namespace) -> None:
    """Print the table, or draw it."""
    if args.output:
        print("wrote", write_picture(args.output, "eight bits", draw))
        return
    console.print(f"{SHAPE}'s shape: {NUM_WEIGHTS / 1e9:.2f} billion weights in products")
    rows = []
    for num_rows in BF16:
        multiplying = 2 * NUM_WEIGHTS * num_rows / CEILINGS.matmul_tflops / 1e9
        reading = NUM_WEIGHTS / CEILINGS.read_gbps / 1e6
        times = step_ms(BF16[num_rows]), step_ms(INT8[num_rows])
        cells = [
            f"{ms:.2f}"
            for size, time in zip((2, 1), times, strict=True)
            for ms in (time, max(multiplying, size * reading))
        ]
        rows.append([str(num_rows), *cells, f"{times[0] / times[1]:.2f}x"])
    headings = ["rows", "bf16, ms", "at best", "8 bits, ms", "at best", "gain"]
    console.print(table("", headings, rows))


def draw() -> Figure:
    """Two slopes and one roof, and what was measured below them."""
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes, tflops = figure.subplots(), CEILINGS.matmul_tflops
    for label, times, marker, color, size in (
        ("bfloat16", BF16, "o", "#74b3e0", 2),
        ("8 bits", INT8, "s", "#08519c", 1),
    ):
        slope = 2 * CEILINGS.read_gbps / size / 1e3  # TFLOP/s a row: two operations a weight
        ridge = tflops / slope
        axes.loglog([0.7, ridge, 500], [0.7 * slope, tflops, tflops], color=color, lw=1.5)
        axes.axvline(ridge, color=color, linestyle=":", linewidth=1)
        places = [(n, 2e-9 * NUM_WEIGHTS * n / step_ms(each)) for n, each in times.items()]
        look = {"color": color, "markeredgecolor": "black", "markersize": 7, "linestyle": "none"}
        axes.plot(*zip(*places, strict=True), marker=marker, label=label, **look)
    look = {"rotation": 29, "rotation_mode": "anchor", "fontsize": 9}
    axes.text(3, 29, "reading bytes", va="bottom", **look)
    axes.text(3.3, 12.5, "reading bfloat16", va="top", **look)
    axes.text(480, 1.08 * tflops, "multiplying", fontsize=9, ha="right")
    set_titles(axes, "Products of a decode step", f"{SHAPE}'s shape, one H200")
    axes.set(xlabel="rows of the step", ylabel="TFLOP/s", xlim=(0.7, 500), ylim=(2, 1500))
    axes.set_xticks([*BF16])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.legend(loc="lower right", frameon=False)
    return figure


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.questions.m5_eight_bits_products", description=__doc__
    )
    parser.add_argument("-o", "--output", metavar="PATH.png")
    add_options(parser, "threads")
    return run_command(show, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
