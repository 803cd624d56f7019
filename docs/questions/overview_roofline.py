"""Prefill and decode under the roofs of two machines. `--record PATH.json` measures this CPU's
points, `-o PATH.png` draws them beside those that M5's records have for a GPU.

A step's operations and bytes are counted as in M0: two a weight and token, attention beside them;
each weight and each KV once.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from milestone_llm.lab.plots.picture import set_titles, write_picture

RECORDS = Path("docs/measurements")


@dataclass(frozen=True)
class Shape:
    """What a model's step costs."""

    in_layers: int
    in_head: int
    query_size: int  # query heads x head_dim x layers
    kv_bytes: int  # of a token
    weight_bytes: int  # of one weight

    def step(self, rows: int, tokens: int, context: float, seconds: float) -> tuple[float, float]:
        """Operations a byte, and operations a second, of rows with so many new tokens each."""
        flop = 2 * rows * (tokens * self.in_layers + self.in_head)
        flop += 4 * rows * tokens * context * self.query_size
        read = (self.in_layers + self.in_head) * self.weight_bytes
        read += rows * (context if tokens == 1 else tokens) * self.kv_bytes
        return flop / read, flop / seconds


SMOLLM2 = Shape(106_203_456, 28_311_552, 9 * 64 * 30, 46_080, 4)
QWEN3 = Shape(440_401_920, 155_582_464, 16 * 128 * 28, 114_688, 2)  # 0.6B's, without its norms


def record(path: Path) -> None:
    """Measure steps of M4 on SmolLM2-135M, and the two roofs of this CPU."""
    import torch

    from m4_prefix_chunked import LLMEngine, SamplingParams
    from milestone_llm.lab.bench.record import made_by
    from milestone_llm.models.checkpoint import load_model

    def best(function) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    big, matrix = torch.ones(2**27), torch.randn(2048, 2048)
    data: dict = made_by(["python", "-m", "docs.questions.overview_roofline", *sys.argv[1:]])
    data |= {"threads": torch.get_num_threads(), "points": []}
    data |= {"bytes_per_s": 0.0, "flop_per_s": 0.0}
    model = load_model("smollm2-135m", dtype="float32", device="cpu").model
    shapes = [("prefill", 1, num_tokens) for num_tokens in (32, 64, 256)]
    shapes += [("decode", num_rows, 64) for num_rows in (1, 2, 4, 8, 16)]
    fastest: dict[tuple[str, int, int], float] = {}
    for shape in shapes * 3:  # rounds in turn: what disturbs one shape disturbs all
        data["bytes_per_s"] = max(data["bytes_per_s"], big.nbytes / best(big.sum))
        data["flop_per_s"] = max(data["flop_per_s"], 2 * 2048**3 / best(lambda: matrix @ matrix))
        kind, num_rows, num_prompt = shape
        engine = LLMEngine(
            model, max_model_len=288, max_num_seqs=16, enable_prefix_caching=False, trace="memory"
        )
        prompts = [[1000 + 7 * row + at for at in range(num_prompt)] for row in range(num_rows)]
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        times = [step.execute_ms for step in engine.tracer.records if step.batch[0].phase == kind]
        fastest[shape] = min(fastest.get(shape, 1e9), *times, 1e9)
    for (kind, num_rows, num_prompt), milliseconds in fastest.items():
        is_prefill = kind == "prefill"
        own = [1, num_prompt, num_prompt / 2] if is_prefill else [num_rows, 1, num_prompt]
        data["points"].append([kind, *own, milliseconds / 1e3])
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def gpu_points() -> list[list]:
    """Decode steps and prefills of M5 on a GPU, from its records."""
    text = (RECORDS / "m5_h200.md").read_text(encoding="utf-8")
    steps = text[text.index("  rows  ms/step") :].split("```")[0].splitlines()[1:]
    points = [["decode", int(r), 1, 600, float(ms) / 1e3] for r, ms, *_ in map(str.split, steps)]
    data = json.loads((RECORDS / "m5_nano.json").read_text(encoding="utf-8"))
    work = data["workload"]  # all prompts are computed when the last request has its first token
    seconds = data["contestants"]["m5_kernels"]["median"]["ttft_p99"] / 1e3
    num_steps = -(-work["input_tokens"] // data["engine"]["max_num_batched_tokens"])
    rows, tokens = work["num_requests"] / num_steps, work["input_tokens"] / work["num_requests"]
    points.append(["prefill", rows, tokens, tokens / 2, seconds / num_steps])
    return points


def panel(
    axes: Axes, title: str, what: str, shape: Shape, roofs: tuple[float, float], points
) -> None:
    """One machine: its two roofs, and the steps below them."""
    bytes_per_s, flop_per_s = roofs
    ridge = flop_per_s / bytes_per_s
    unit, name = (1e12, "TFLOP/s") if flop_per_s > 1e13 else (1e9, "GFLOP/s")
    left, right = 0.2, 150 * ridge
    axes.loglog(
        [left, ridge, right],
        [left * bytes_per_s / unit, flop_per_s / unit, flop_per_s / unit],
        color="black",
    )
    axes.axvline(ridge, color="#999999", linestyle=":", linewidth=1)
    for kind, marker, fill in (("decode", "o", "#74b3e0"), ("prefill", "s", "#08519c")):
        own = [point for point in points if point[0] == kind]
        places = [(x, y / unit) for x, y in (shape.step(*point[1:]) for point in own)]
        look = {"color": fill, "markeredgecolor": "black", "linestyle": "none"}
        axes.plot(*zip(*places, strict=True), marker, label=kind, markersize=7, **look)
        for (_, rows, tokens, *_), (x, y) in zip(own, places, strict=True):
            text = f"{rows * tokens:,.0f} tokens"
            if kind == "decode":
                text = f"{rows} row{'s' * (rows > 1)}"
            side = {"xytext": (8, -10), "ha": "left"}
            if rows == 256 or tokens == 32:  # there is no place below
                side = {"xytext": (-8, 5), "ha": "right"}
            axes.annotate(text, (x, y), textcoords="offset points", fontsize=8, **side)
    place = {"transform": axes.get_xaxis_transform(), "fontsize": 9, "va": "top"}
    axes.text(ridge / 1.15, 0.99, "reading decides", ha="right", **place)
    axes.text(ridge * 1.15, 0.99, "arithmetic decides", ha="left", **place)
    axes.set_ylim(
        0.5 * min(shape.step(*point[1:])[1] for point in points) / unit, 4 * flop_per_s / unit
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    set_titles(axes, title, what)
    axes.set(xlabel="operations for each byte read", ylabel=name, xlim=(left, right))
    axes.legend(loc="lower right", frameon=False)


def draw() -> Figure:
    """The CPU on the left, the GPU on the right."""
    cpu = json.loads((RECORDS / "roofline_cpu.json").read_text(encoding="utf-8"))
    text = (RECORDS / "m5_h200.md").read_text(encoding="utf-8")
    read, product = re.search(
        r"reads at ([\d,]+) GB/s and products at (\d+) TFLOP/s", text
    ).groups()
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    what = f"M4, SmolLM2-135M in float32, context 64, threads: {cpu['threads']}"
    panel(left, "A CPU", what, SMOLLM2, (cpu["bytes_per_s"], cpu["flop_per_s"]), cpu["points"])
    roofs = (float(read.replace(",", "")) * 1e9, float(product) * 1e12)
    panel(
        right,
        "An H200",
        "M5, Qwen3-0.6B's shape in bfloat16, context 600",
        QWEN3,
        roofs,
        gpu_points(),
    )
    return figure


def main() -> None:
    """Measure, draw, or print the points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="PATH.json", type=Path)
    parser.add_argument("-o", "--output", metavar="PATH.png")
    options = parser.parse_args()
    if options.record:
        record(options.record)
    if options.output:
        print("wrote", write_picture(options.output, "roofline", draw))


if __name__ == "__main__":
    main()
