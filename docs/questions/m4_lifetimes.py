"""A request's blocks in two groups of layers, from a trace: `python -m docs.questions.m4_lifetimes`

One layer sees all tokens, two see the last 24. A line is a step: `#` is a block that the request
holds, `.` one that it has given back.
"""

import tempfile
from pathlib import Path

from m4_prefix_chunked import LLMEngine, SamplingParams
from milestone_llm.core.kv import NULL_BLOCK
from milestone_llm.trace.jsonl import read_run

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "run.jsonl"
    engine = LLMEngine(
        "tiny-gemma3", block_size=8, max_model_len=128, max_num_batched_tokens=16, trace=str(path)
    )
    prompt, params = list(range(3, 53)), SamplingParams(max_tokens=57, ignore_eos=True)
    engine.generate([prompt], params)
    records = read_run(path)

print("step  computes   sees all        sees 24")
shown = {0, 1, 2, 3, 4, *range(10, 61, 7)}
for record in records:
    if record.step in shown and record.batch:
        (row,) = record.batch
        tables = [
            "".join("." if block == NULL_BLOCK else "#" for block in table)
            for table in (row.blocks, row.further_blocks[0])
        ]
        print(f"{record.step:4}  {row.start:3}..{row.end - 1:<5} {tables[0]:15} {tables[1]}")
