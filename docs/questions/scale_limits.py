"""What 1, 8 and 1,000 replicas ask of what stands in front of them, reckoned from measured figures.

A replica is M5 on an H200 as recorded in docs/measurements/m5_nano.json. HTTP's share of the CPU
time is in docs/measurements/serving_overhead.md; bytes of a name and lines of /metrics are taken
here.
"""

import json
from pathlib import Path

from milestone_llm.serving.api.metrics import Metrics
from milestone_llm.serving.engine.client import EngineReport
from milestone_llm.serving.replicas.router import Router

DOCS = Path(__file__).parents[1]
KV_BYTES = 100e9  # an H200 less weights and activations, roughly
TOKEN_BYTES = 28 * 2 * 8 * 128 * 2  # Qwen3-0.6B: layers, keys and values, KV heads, width, bfloat16
BLOCK_SIZE, STRIDE = 16, 8

recorded = json.loads((DOCS / "measurements/m5_nano.json").read_text(encoding="utf-8"))
seconds = recorded["contestants"]["m5_kernels"]["median"]["seconds"]
tokens = recorded["workload"]["output_tokens"] / seconds
prompts = recorded["workload"]["num_requests"] / seconds
record = (DOCS / "measurements/serving_overhead.md").read_text(encoding="utf-8")
# Two CPU cores and an engine that only waits: its tokens go out in events of a few each.
overhead = json.loads(record[record.index("{") : record.rindex("}") + 1])
http_ms = overhead["http_cpu_ms_per_token"]["stream"]

router = Router(max_blocks=50_000)
router.add("r0")
router.choose([number.to_bytes(32, "big") for number in range(50_000)], 1)
name_bytes = router.stats()["bytes"] / 50_000
num_names = KV_BYTES / TOKEN_BYTES / BLOCK_SIZE


def page_of(replicas):
    """The lines of /metrics and their bytes."""
    names = [f"{number:08x}" for number in range(replicas)]
    page = Metrics("model").page([EngineReport({}, name) for name in names])
    return sum(not line.startswith(b"#") for line in page.splitlines()), len(page)


num_series, num_bytes = page_of(1)

print(
    f"a replica: {tokens:,.0f} tokens and {prompts:.0f} prompts a second; {num_names:,.0f} blocks"
)
print(f"the front: {http_ms:.3f} ms of Python a streamed token; {num_series} series, and")
print(f"{num_bytes / 1e3:.0f} kB a page of metrics; the router: {name_bytes:.0f} bytes a name\n")
print("replicas  prompts/s   tokens/s  fronts busy  names, MB  every 8th  series  a page, kB")
for replicas in (1, 8, 1000):
    size = replicas * num_names * name_bytes / 1e6
    num_series, num_bytes = page_of(replicas)
    print(
        f"{replicas:8,}{replicas * prompts:11,.0f}{replicas * tokens:11,.0f}"
        f"{replicas * tokens * http_ms / 1e3:13,.1f}{size:11,.0f}{size / STRIDE:11,.0f}"
        f"{num_series:8,}{num_bytes / 1e3:12,.0f}"
    )
