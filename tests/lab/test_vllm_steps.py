"""The tracer for vLLM: what it writes of vLLM's own scheduler. Skipped where there is no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m4_prefix_chunked.tools.vllm.fetch import HERE
from milestone_llm.lab.explorer.page import Run, write_page
from milestone_llm.trace.jsonl import read_run

ROOT = Path(__file__).parents[2]
FETCHED = sorted((ROOT / HERE).glob("*/vllm"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FETCHED, reason="no vLLM: python -m m4_prefix_chunked.tools.vllm.fetch"),
]
each_vllm = pytest.mark.parametrize("folder", [f.parent for f in FETCHED], ids=lambda f: f.name)


def run(program: list[str], **environment: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@each_vllm
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_in_vllms_engine_core_the_records_are_whole(folder, mode, tmp_path):
    trace = tmp_path / "run.jsonl"
    out = run(["tests/helpers/vllm_core.py", str(folder), mode, str(trace)], STEP_TRACE_PROMPTS="1")
    tokens = json.loads(out.splitlines()[-1])
    records = read_run(trace)  # which checks all fields
    sampled: dict[str, list[int]] = {}
    held: dict[str, list[int]] = {}
    for record in records:
        for row in record.batch:
            if row.sampled_token is not None:
                sampled.setdefault(row.request_id, []).append(row.sampled_token)
        for event in record.events:
            if event.type in ("alloc", "share"):
                held.setdefault(event.request_id, []).extend(event.blocks)
            elif event.type == "free":
                assert held.pop(event.request_id) == event.blocks
    assert not held, "blocks that were never given back"
    assert {name: sampled[name][: len(ids)] for name, ids in tokens.items()} == tokens
    assert sum(len(record.preempted) for record in records)
    assert sum(row.num_cached_tokens for record in records for row in record.batch)
    assert any(record.waiting_reasons for record in records)
    assert len({tuple(p["hashes"][:3]) for r in records for p in r.prompts.values()}) < len(tokens)
    assert records[-1].kv.used == 0
    assert records[-1].kv.total == 16
    write_page([Run("vLLM", records, 48)], tmp_path / "run.html")


SAME_AS_STEPS = """
import os, sys
from pathlib import Path
from m4_prefix_chunked.tools.vllm.fetch import make_importable
make_importable(Path(sys.argv[1]))
from m4_prefix_chunked.tools.vllm.compare import KINDS, draw, drive
from m4_prefix_chunked.tools.vllm.run_vllm import Recorded, VLLMRun
from milestone_llm.lab.vllm_steps import TracedScheduler
from milestone_llm.trace.jsonl import read_run

class Both(TracedScheduler, Recorded):
    pass

num_drafts = 0
for seed in range(12):
    for kind in ("text", "ahead", "speculation"):
        fixed = KINDS[kind]
        traffic = draw(seed, **fixed)
        steps = [s for (s,) in drive(traffic, VLLMRun(traffic.limits, Both)) if s.rows]
        records = [r for r in read_run(os.environ["STEP_TRACE"]) if r.batch]
        for step, record in zip(steps, records):
            rows = [(r.name, r.start, r.blocks, len(r.drafts)) for r in step.rows]
            assert rows == [
                (r.request_id, r.start, r.blocks, r.num_draft_tokens) for r in record.batch
            ]
            assert step.admitted == record.admitted and step.resumed == record.resumed
            assert step.preempted == [each["request_id"] for each in record.preempted]
            num_drafts += sum(r.num_draft_tokens for r in record.batch)
        assert len(steps) == len(records)
assert num_drafts
"""


@each_vllm
def test_a_trace_says_what_the_scheduler_decided(folder, tmp_path):
    """Random traffic: steps ahead and draft tokens, too."""
    run(["-c", SAME_AS_STEPS, str(folder)], STEP_TRACE=str(tmp_path / "run.jsonl"))


CACHE_RESET = """
import os, sys
from pathlib import Path
from m4_prefix_chunked.tools.vllm.fetch import make_importable
make_importable(Path(sys.argv[1]))
from m4_prefix_chunked.tools.vllm import run_vllm
from m4_prefix_chunked.tools.vllm.traffic import Arrival, Limits
from milestone_llm.lab.vllm_steps import TracedScheduler
from milestone_llm.trace.jsonl import read_run

limits = Limits(8, 4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32)
scheduler = run_vllm.make_scheduler(limits, TracedScheduler)
for number, name in enumerate("ab"):
    each = Arrival(0, name, [number] * 9, 1)
    scheduler.add_request(run_vllm.make_request(name, each, 0, limits))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, run_vllm.model_output({name: [5]}))
    if name == "a":
        assert scheduler.reset_prefix_cache()
cached = [record.kv.cached for record in read_run(os.environ["STEP_TRACE"])]
assert cached == [1, 1], cached  # the whole block of each
"""


@each_vllm
def test_blocks_are_not_cached_any_more_after_a_reset(folder, tmp_path):
    run(["-c", CACHE_RESET, str(folder)], STEP_TRACE=str(tmp_path / "run.jsonl"))


@each_vllm
def test_a_file_has_a_limit_and_no_prompts_unless_asked_for(folder, tmp_path):
    trace = tmp_path / "run.jsonl"
    program = ["tests/helpers/vllm_core.py", str(folder), "sync", str(trace)]
    run(program, STEP_TRACE_MAX_MB="0.02")
    assert 10_000 < trace.stat().st_size <= 20_000
    prompts = [prompt for record in read_run(trace) for prompt in record.prompts.values()]
    assert prompts
    assert not any(prompt["hashes"] for prompt in prompts)
