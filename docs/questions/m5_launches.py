"""What is launched in a decode step, added up: kernels and copies of a step recorded on an H200.

Four rows, kernel by kernel; the trace is docs/traces/m5_h200_launched.jsonl.gz.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

STEP, LAYERS = 1, 28
TRACE = Path(__file__).parents[1] / "traces" / "m5_h200_launched.jsonl.gz"

with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
    device = [json.loads(line) for line in lines][STEP]["device"]
names = [kernel["name"] for kernel in device["kernels"]]
first, last = (
    find(i for i, name in enumerate(names) if name == "_rope_kv_write_kernel")
    for find in (min, max)
)
length = (last - first) // (LAYERS - 1)  # of a layer, in launches
begin, end = first - 1, first - 1 + LAYERS * length
layers = Counter(names[begin:end])
of_library = layers.pop("splitKreduce_kernel", 0)
expand = names.index("_expand_step_kernel")
score = names.index("_score_chunk_kernel")
head = next(i for i in range(end, score) if names[i].startswith("nvjet"))

parts = {
    f"{LAYERS} layers of {layers.total() // LAYERS}": layers.total(),
    "sums of products that the library splits, as rows are few": of_library,
    "what changed: sent, made int32, put in its places": expand,
    "expand_step, embedding, first norm": begin - expand,
    "product of the LM head": head + 1 - end,
    "temperatures and seeds of the rows": score - head - 1,
    "sample: the best of each chunk, the best of all": 2,
    "append_sampled": 1,
    "the tokens, copied to the host": len(names) - score - 3,
}
for what, number in parts.items():
    print(f"{number:4}  {what}")
print(
    f"{sum(parts.values()):4}  launches in a step of four rows; the profiler counted {len(names)}"
)
num_alone = len(names) - expand
print(f"{num_alone:4}  where nothing changed: no request came, went or got a block")
num_of_library = of_library + head - end
print(
    f"{num_alone - num_of_library:4}  where the library has no sums to make, and no memory to clear"
)
