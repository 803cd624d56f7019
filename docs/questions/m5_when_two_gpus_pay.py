"""When do two GPUs make a model faster? Arithmetic, compared with measurements.

One request: a step reads every weight once. Two GPUs read half each, and wait for two all-reduces a
layer. Measured figures are read from docs/measurements/m5_two_gpus.md.
"""

import re
from pathlib import Path

from docs.measured import parts
from milestone_llm.models.shapes import SHAPES

RECORD = Path(__file__).parents[1] / "measurements" / "m5_two_gpus.md"
READ_TB_PER_S = 4.5
"""Most that an H200 reads (docs/measurements/m5_h200.md)."""


def weight_bytes(shape: dict) -> int:
    """Return bytes that a step of one row reads: all matrices in bf16, and one row of the
    embedding."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = hidden * shape["head_dim"] * (2 * heads + 2 * shape["num_key_value_heads"])
    mlp = 3 * hidden * shape["intermediate_size"]
    layers = shape["num_hidden_layers"] * (attention + mlp)
    return 2 * (layers + hidden * shape["vocab_size"])


def measured(name: str) -> tuple[float, float, float]:
    """Return tokens a second on one GPU and on two, and microseconds of an all-reduce with its
    norm."""
    command = rf"--model random-{name} --single.*?```"
    text = re.search(command, parts(RECORD.read_text())[1], re.DOTALL)[0]
    one = re.search(r"m5_kernels, one rank +([\d,.]+)", text)[1]
    two = re.search(r"m5_kernels  +([\d,.]+)", text)[1]
    all_reduce = re.search(r"way, us.*?\n +1 +([\d.]+)", text)[1]
    return float(one.replace(",", "")), float(two.replace(",", "")), float(all_reduce)


print("          GB per step   reading half    all-reduces of a step      measured, tok/s")
print("            (weights)          saves     and their norms take    one GPU    two GPUs")
for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-32b"):
    shape = SHAPES[name]
    size = weight_bytes(shape)
    saved_ms = size / 2 / READ_TB_PER_S / 1e9
    one, two, microseconds = measured(name)
    num_sums = 2 * shape["num_hidden_layers"] + 1
    cost_ms = num_sums * microseconds / 1e3
    print(
        f"{name:10}  {size / 1e9:9.1f}   {saved_ms:9.2f} ms   {num_sums:4} x {microseconds} us = "
        f"{cost_ms:4.2f} ms   {one:8.1f}   {two:8.1f}  {two / one:.2f}x"
    )
