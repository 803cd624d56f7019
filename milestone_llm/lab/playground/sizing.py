"""Which GPU for which model and load? `python -m milestone_llm.lab.playground.sizing --help`

    KV a token      2 x layers x KV heads x head size x bytes of a number
    KV tokens       (0.9 x memory - weights) / KV a token
    rows            the rows that are wanted, or KV tokens / (prompt + output) if these are fewer
    TTFT alone      a step with the whole prompt of one request
    TPOT            a step with a token of each row, in the middle of its output
    requests/s      1 / (TTFT alone + output x TPOT / rows)

A step is the playground's formula (`machine.py`). With `--rate`, requests come at random, and M4's
scheduler plans each step: TTFT then has the time in the queue, and TPOT the prompts of others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from milestone_llm.cli import Formatter, ended_in_one_line

from .gpus import ARITHMETIC_SHARE, GPUS, MEASURED, MEMORY_SHARE, MODELS, gpu_machine
from .setting import Setting, Side, random_requests, told_in_a_line
from .simulate import MAX_BLOCKS, run_setting

KEPT = 0.9
"""Share of a GPU's memory that weights and KV may fill; activations and CUDA take the rest."""
BLOCK_SIZE, BUDGET = 16, 2048
NUM_REQUESTS, MAX_TOKENS = 200, 12_000
"""Requests of a run, and the most tokens that they make together."""


@checked_dataclass(frozen=True, config={"extra": "forbid"})
class Load:
    """A model and what is asked of it: the sliders of the page."""

    model: str = "qwen3-8b"
    weight_bytes: Annotated[float, Field(gt=0, le=4)] = 2
    kv_bytes: Annotated[float, Field(gt=0, le=4)] = 2
    prompt: Annotated[int, Field(ge=1, le=4096)] = 1024
    output: Annotated[int, Field(ge=2, le=2048)] = 256
    rows: Annotated[int, Field(ge=1, le=512)] = 32
    """Requests at once, at most."""


@dataclass(frozen=True)
class Size:
    """What a GPU makes of a load. Without room for one request, times and rates are 0."""

    gpu: str
    weights: float
    """Bytes."""
    kv_tokens: int
    rows: int
    ttft: float
    """Seconds."""
    tpot: float
    """Seconds."""
    tokens: float
    """Output tokens a second."""
    requests: float
    """Requests a second."""


def size(gpu: str, load: Load) -> Size:
    """Return what a GPU makes of a load, by the formulas above."""
    shape, machine = (
        MODELS[load.model],
        gpu_machine(gpu, load.model, load.weight_bytes, load.kv_bytes),
    )
    weights = shape.weights * load.weight_bytes
    room = KEPT * GPUS[gpu].memory - weights
    kv_tokens = max(0, int(room // machine.kv_bytes))
    rows = min(load.rows, kv_tokens // (load.prompt + load.output))
    if not rows:
        return Size(gpu, weights, kv_tokens, 0, 0, 0, 0, 0)
    ttft = machine.step_seconds(load.prompt, 1, load.prompt**2 / 2, load.prompt)
    context = rows * (load.prompt + load.output / 2)
    tpot = machine.step_seconds(rows, rows, context, context)
    requests = 1 / (ttft + load.output * tpot / rows)
    return Size(gpu, weights, kv_tokens, rows, ttft, tpot, requests * load.output, requests)


def setting_of(gpu: str, load: Load, rate: float) -> Setting:
    """Return the playground's setting of a load that comes at `rate` requests a second."""
    found = size(gpu, load)
    count = min(NUM_REQUESTS, MAX_TOKENS // load.output)
    lengths = (load.prompt, load.prompt), (load.output, load.output)
    fields = {
        "max_num_seqs": found.rows,
        "max_model_len": load.prompt + load.output,
        "max_num_batched_tokens": BUDGET,
        "block_size": BLOCK_SIZE,
        "kv_cache_tokens": min(found.kv_tokens, MAX_BLOCKS * BLOCK_SIZE),
        "enable_prefix_caching": False,
    }
    machine = f"{gpu} {load.model} {load.weight_bytes:g} {load.kv_bytes:g}"
    specs = random_requests(count, rate, 0, *lengths)
    return Setting(specs, [Side("m4_prefix_chunked", fields)], machine)


def run(gpu: str, load: Load, rate: float) -> dict[str, float]:
    """Return the playground's figures of a load on a GPU; none if no request has room.

    Raises:
        InputError: the engine refuses the setting.
    """
    if not size(gpu, load).rows:
        return {}
    return run_setting(setting_of(gpu, load, rate))[0].figures


def answer(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures and a link to the playground for the page: `gpu`, `rate` and a load."""
    with told_in_a_line():
        load = TypeAdapter(Load).validate_python(data["load"])
    gpu, rate = data["gpu"], float(data["rate"])
    figures = run(gpu, load, rate)
    return {"figures": figures, "link": setting_of(gpu, load, rate).to_link() if figures else ""}


def page_data() -> dict[str, Any]:
    """Return GPUs, models and constants for the page's own formulas."""
    sizes = ("layer_weights", "head_weights", "weights", "query_size", "kv_numbers")
    return {
        "gpus": {name: asdict(gpu) for name, gpu in GPUS.items()},
        "models": {
            name: {"title": shape.title, **{each: getattr(shape, each) for each in sizes}}
            for name, shape in MODELS.items()
        },
        "kept": KEPT,
        "overhead_s": MEASURED.overhead_s,
        "memory_share": MEMORY_SHARE,
        "arithmetic_share": ARITHMETIC_SHARE,
        "load": asdict(Load()),
    }


def show(load: Load, rate: float | None) -> None:
    """Print the table."""
    shape = MODELS[load.model]
    weights, kv_bytes = shape.weights * load.weight_bytes, shape.kv_numbers * load.kv_bytes
    print(
        f"{shape.title}: {weights / 1e9:.1f} GB of weights, {kv_bytes / 1e3:.0f} KB of KV a token"
    )
    print(f"{load.rows} rows of {load.prompt} tokens in and {load.output} out\n")
    queue = f"   at {rate:g} a second: TTFT, s  TPOT, ms" if rate else ""
    print(f"GPU        KV tokens  rows  TTFT, ms  TPOT, ms  tokens/s  requests/s{queue}")
    for gpu, card in GPUS.items():
        each = size(gpu, load)
        if not each.rows:
            print(f"{card.title:9}{each.kv_tokens:11,}     0  too little memory")
            continue
        line = f"{card.title:9}{each.kv_tokens:11,}{each.rows:6}{1e3 * each.ttft:10.1f}"
        line += f"{1e3 * each.tpot:10.1f}{each.tokens:10,.0f}{each.requests:12.1f}"
        if rate:
            figures = run(gpu, load, rate)
            line += f"{figures['ttft']:26.2f}{figures['tpot']:10.1f}"
        print(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m milestone_llm.lab.playground.sizing",
        description=__doc__,
        formatter_class=Formatter,
    )
    add, defaults = parser.add_argument, Load()
    add("--model", choices=MODELS, default=defaults.model)
    add("--weight-bytes", type=float, default=defaults.weight_bytes, help="2, 1, or 0.56: 4 bits")
    add("--kv-bytes", type=float, default=defaults.kv_bytes, help="2, or 1 in fp8")
    add("--prompt", type=int, default=defaults.prompt, help="tokens")
    add("--output", type=int, default=defaults.output, help="tokens")
    add("--rows", type=int, default=defaults.rows, help="requests at once, at most")
    add("--rate", type=float, help="requests a second: M4's scheduler serves them")
    given = vars(parser.parse_args(arguments))
    rate = given.pop("rate")

    def checked() -> None:
        with told_in_a_line():
            load = Load(**given)
        show(load, rate)

    return ended_in_one_line(checked)


if __name__ == "__main__":
    sys.exit(main())
