"""Conflicts, and the measured effect of what resolves each: from records, or counted now."""

import json
import re
from pathlib import Path

import torch

from docs.measured import parts
from docs.questions.compute_tiles import HEAD_DIM, HEADS, PeakMemory, tiled, whole
from docs.questions.m0_cache import NUM_NEW, NUM_PROMPT, generate
from docs.questions.m0_transformer import Model
from m3_paged import LLMEngine
from milestone_llm.lab.bench.workloads import mixed, serve
from milestone_llm.models.checkpoint import load_model

RECORDS = Path("docs/measurements")
torch.set_grad_enabled(False)


def show(conflict: str, answer: str, without: str, with_it: str, source: str) -> None:
    """A line of the table."""
    print(f"{conflict:26}{answer:23}{without:>23}{with_it:>22}   {source}")


def recorded(name: str, contestant: str, figure: str = "tok_s") -> float:
    """A median of a bench's record."""
    record = json.loads((RECORDS / name).read_text(encoding="utf-8"))
    return record["contestants"][contestant]["median"][figure]


show("conflict", "resolved by", "without", "with", "source")

model = Model(load_model("tiny-llama", dtype="float32", device="cpu").model)
cached, all_again = (generate(model, list(range(NUM_PROMPT)), has)[1] for has in (True, False))
name = f"{NUM_NEW} tokens, one by one"
show(name, "KV cache", f"{all_again} positions", f"{cached} positions", "counted here")

lines = (RECORDS / "m3_cpu.md").read_text().splitlines()
rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
region, block = ([row for row in rows if row[:1] == [layout]] for layout in ("region", "block"))
for table, column, kind in ((0, 1, "{} tok/s"), (1, 3, "{} of it empty")):
    figures = [kind.format(layout[table][column]) for layout in (region, block)]
    show("KV for the longest case", "blocks", *figures, "m3_cpu.md")

text = (RECORDS / "m4_prefix.md").read_text()
off, on = (
    re.search(rf"caching {which} \| [\d,]+ \| ([\d,]+) ", text)[1] for which in ("off", "on")
)
show("equal prompts", "prefix cache", f"{off} ms to the first", f"{on} ms", "m4_prefix.md")

static, own = (recorded("m2_cpu.json", who) for who in ("HF static batch", "m2_batching"))
show(
    "rows without work",
    "continuous batching",
    f"{static:.1f} tok/s",
    f"{own:.1f} tok/s",
    "m2_cpu.json",
)

items = mixed(199)
needed = sum(len(item.prompt) + item.params.max_tokens for item in items)
engine = LLMEngine(
    "tiny-llama", device="cpu", max_num_seqs=16, max_model_len=256, kv_cache_tokens=512
)
outputs = serve(engine, items)
assert all(output.finish_reason == "length" for output in outputs)
done = f"{engine.scheduler.num_blocks * 16} do, {engine.stats()['preemptions']} preempted"
show("memory runs out", "preemption", f"{needed:,} tokens of KV", done, "counted here")

inputs = torch.randn(3, HEADS, 2048, HEAD_DIM).unbind()
peaks = []
for attention in (whole, tiled):
    with PeakMemory(*inputs) as memory:
        attention(*inputs)
    peaks.append(f"{memory.peak / 1e6:.0f} MB")
show("N x N scores, N = 2,048", "tiles", *peaks, "counted here")

show("KV too large: Qwen3-8B", "GQA", "576 KiB a token", "144 KiB a token", "its config")

eager, graph = (recorded("m5_single.json", who, "tpot_p50") for who in ("- graphs", "m5_kernels"))
show(
    "launches, one request",
    "graphs, pipelining",
    f"{eager:.2f} ms per token",
    f"{graph:.2f} ms per token",
    "m5_single.json",
)
plain, fused = (recorded("m5_nano.json", who) for who in ("- rope-kv", "m5_kernels"))
show(
    "launches, 256 requests",
    "QK-norm+RoPE+KV fused",
    f"{plain:,.0f} tok/s",
    f"{fused:,.0f} tok/s",
    "m5_nano.json",
)
text = (RECORDS / "spec_speed_8b.md").read_text()
alone, guessed = re.search(r"^edit +1 +([\d,]+) .*?\| 3: +([\d,]+) ", text, re.M).groups()
show("a token a step, 8B", "speculation", f"{alone} tok/s", f"{guessed} tok/s", "spec_speed_8b.md")
text = parts((RECORDS / "m5_int8_h200.md").read_text())[1]
bf16, int8 = (
    re.search(rf"^ {who} +([\d,.]+)", text, re.M)[1] for who in ("- eight-bits", "m5_kernels")
)
show("weights to read, 8B", "eight bits", f"{bf16} tok/s", f"{int8} tok/s", "m5_int8_h200.md")
text = parts((RECORDS / "m5_two_gpus.md").read_text())[1]
for conflict, options in (
    ("one GPU for Qwen3-8B", "--rounds"),
    ("the same, one request", "--single"),
):
    run = re.search(rf"--model random-qwen3-8b {options}.*?```", text, re.S)[0]
    two, one = re.findall(r"^ m5_kernels(?:, one rank)?  +([\d,]+\.\d)", run, re.M)[:2]
    show(conflict, "tensor parallelism", f"{one} tok/s", f"{two} tok/s", "m5_two_gpus.md")
