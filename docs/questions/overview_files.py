"""Which file has which idea, and how many lines must one read for it?"""

from pathlib import Path

IDEAS = {
    "all of them, in small": "docs/tiny_engine.py",
    "the step: plan, launch, settle": "milestone_llm/core/engine_core.py",
    "a request and its counters": "milestone_llm/core/request.py",
    "static batch": "m1_single/scheduler.py",
    "continuous batching": "m2_batching/scheduler.py",
    "flat rows": "m2_batching/attention.py",
    "blocks, block tables": "m3_paged/block_manager.py",
    "preemption": "m3_paged/preemption.py",
    "prefix cache": "m4_prefix_chunked/prefix_cache.py",
    "chunked prefill": "m4_prefix_chunked/scheduler.py",
    "speculation": "m4_prefix_chunked/speculation.py",
    "a fused decoder layer": "m5_kernels/decoder/decoder.py",
    "Flash-Decoding": "m5_kernels/kernels/flash_decode.py",
    "CUDA graphs": "m5_kernels/step_graphs.py",
    "positions and slots on the device": "m5_kernels/kernels/expand_step.py",
}

for idea, path in IDEAS.items():
    num_lines = len(Path(path).read_text(encoding="utf-8").splitlines())
    print(f"{idea:36}{path:42}{num_lines:5}")
packages = [Path(name) for name in ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked")]
core = Path("milestone_llm/core")
for name, folders in {"M1 to M4": packages, "the core": [core], "M5": [Path("m5_kernels")]}.items():
    files = [file for folder in folders for file in folder.rglob("*.py")]
    total = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    print(f"{name:36}{f'all {len(files)} files':40}{total:7,}")
