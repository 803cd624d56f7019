"""Where to find in vLLM what is here: the one source of `docs/reference/names.md`.

    python -m docs.vllm_map                          check our side, and print the table
    python -m docs.vllm_map --vllm runs/vllm/0.33.0  check vLLM's side, too, and note its lines

Nothing is imported. `ast` finds each function, and the words must be in its source. Line numbers
of vLLM are kept in `vllm_lines.json`, with the version in which they were found.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINES = Path(__file__).with_name("vllm_lines.json")
URL = "https://github.com/vllm-project/vllm/blob/v{version}/vllm/{file}#L{line}"
M4, M3, CORE = "m4_prefix_chunked/", "m3_paged/", "milestone_llm/core/"
FRONTEND, M5 = "milestone_llm/frontend/", "m5_kernels/"
V1, SCHED = "v1/core/", "v1/core/sched/scheduler.py"
MANAGER, POOL = V1 + "kv_cache_manager.py:KVCacheManager", V1 + "block_pool.py:BlockPool"


@dataclass(frozen=True)
class Row:
    """A function or class of ours, and where vLLM has the like."""

    here: str
    """`file:Qualified.name`; without a file, a word that is no function."""
    there: str
    """The same in vLLM, below `vllm/`."""
    words: tuple[str, ...] = ()
    """What vLLM's source must hold there."""
    nano: str = ""
    """The name in nano-vllm."""
    note: str = ""


MAP = [
    Row(M4 + "scheduler.py:Scheduler.schedule", SCHED + ":Scheduler.schedule", ("token_budget",),
        "`Scheduler.schedule`", "nano-vllm: a step is either all prompts or all decode"),
    Row(M4 + "scheduler.py:Scheduler._decode", SCHED + ":Scheduler.schedule",
        ("self.running[req_index]",), "", "the first loop, which takes prompts under way, too"),
    Row(M4 + "scheduler.py:Scheduler._prefill", SCHED + ":Scheduler.schedule", ("peek_request",),
        "", "the second loop; left out if a request was preempted, as here"),
    Row(M4 + "scheduler.py:Scheduler._add_row", SCHED + ":Scheduler.schedule",
        ("long_prefill_token_threshold", "num_new_tokens"), "",
        "`num_new_tokens`: what is cut from it, in order"),
    Row(M4 + "scheduler.py:Scheduler._make_room", SCHED + ":Scheduler.schedule",
        ("preempted_req",), "`can_append`, `may_append`", "`while True` around `allocate_slots`"),
    Row(M4 + "scheduler.py:Scheduler.by_seniority", SCHED + ":Scheduler.schedule",
        ("r.priority, r.arrival_time",), "", "`max(self.running, ...)`: who is preempted"),
    Row(M4 + "scheduler.py:Scheduler.reason_to_wait", SCHED + ":Scheduler.schedule",
        ("num_running",), "", "each `break` of the second loop is a reason; none is kept"),
    Row(M4 + "scheduler.py:Scheduler._admit", MANAGER + ".allocate_slots",
        ("full_sequence_must_fit",), "", "blocks of this chunk, if the whole prompt would fit"),
    Row(M3 + "preemption.py:Preempter.preempt", SCHED + ":Scheduler._preempt_request",
        ("num_preemptions", "prepend_request"), "`Scheduler.preempt`",
        "computed again, not swapped"),
    Row(CORE + "scheduler.py:BaseScheduler.mark_launched",
        SCHED + ":Scheduler._update_after_schedule",
        ("num_computed_tokens",)),
    Row(CORE + "scheduler.py:BaseScheduler.update", SCHED + ":Scheduler.update_from_output",
        ("sampled_token_ids",), "`Scheduler.postprocess`"),
    Row(M4 + "speculation.py:Speculation.settle", SCHED + ":Scheduler.update_from_output",
        ("num_rejected", "num_accepted"), "",
        "`num_computed_tokens` goes back by the draft tokens that were wrong"),
    Row(CORE + "scheduler.py:BaseScheduler.add", SCHED + ":Scheduler.add_request"),
    Row(CORE + "scheduler.py:BaseScheduler.finish", SCHED + ":Scheduler.finish_requests"),
    Row(M4 + "kv_cache_manager.py:KVCacheManager.free", SCHED + ":Scheduler._free_request"),
    Row(M4 + "kv_cache_manager.py:KVCacheManager.reset_prefix_cache",
        SCHED + ":Scheduler.reset_prefix_cache"),
    Row(CORE + "plan.py:StepPlan", V1 + "sched/output.py:SchedulerOutput",
        ("num_scheduled_tokens",), "",
        "tables go to the runner as differences, `CachedRequestData`"),
    Row(CORE + "plan.py:LaunchedStep", V1 + "sched/async_scheduler.py:AsyncScheduler",
        ("num_output_placeholders",), "", "here `num_in_flight`"),
    Row(CORE + "request_queue.py:RequestQueue", V1 + "sched/request_queue.py:create_request_queue",
        ("PriorityRequestQueue", "FCFSRequestQueue"), "two deques", "a class for each policy"),
    Row(CORE + "request.py:Request", "v1/request.py:Request",
        ("num_computed_tokens", "block_hashes"), "`Sequence`",
        "nano-vllm keeps the block table in it"),
    Row(CORE + "request.py:RequestStatus", "v1/request.py:RequestStatus", ("PREEMPTED",),
        "`SequenceStatus`", "`PREEMPTED` there, and several ends instead of one"),
    Row(CORE + "request.py:Request.num_uncomputed_tokens",
        "v1/request.py:Request.num_tokens_with_spec",
        (), "", "minus `num_computed_tokens`"),
    Row(CORE + "request.py:Request._end_if_due", V1 + "sched/utils.py:check_stop",
        ("max_model_len",)),
    Row(M4 + "kv_cache_manager.py:KVCacheManager", MANAGER, (), "`BlockManager`",
        "here `BlockManager` is the part with the block tables"),
    Row(M4 + "prefix_cache.py:PrefixCache.find", MANAGER + ".get_computed_blocks",
        ("num_tokens - 1",), "in `can_allocate`", "whole blocks only"),
    Row(M4 + "prefix_cache.py:PrefixCache.make_findable", POOL + ".cache_full_blocks",
        ("block_hash",), "", "called by `allocate_slots`, at planning"),
    Row(M4 + "prefix_cache.py:PrefixCache._hash", V1 + "kv_cache_utils.py:get_request_block_hasher",
        ("hash_block_tokens",), "", "hashes are kept in `Request.block_hashes`"),
    Row(CORE + "block_hashes.py:hash_block", V1 + "kv_cache_utils.py:hash_block_tokens", (),
        "`compute_hash`", "SHA-256; nano-vllm: xxh64, then it compares tokens"),
    Row(M4 + "caching_pool.py:CachingBlockPool", POOL, ("free_block_queue",),
        "`free_block_ids`",
        "ours and vLLM's take a block out in O(1), nano-vllm looks through a deque"),
    Row(M4 + "caching_pool.py:CachingBlockPool.allocate", POOL + ".get_new_blocks",
        ("_maybe_evict_cached_block",), "", "block 0, the null block, is never given out"),
    Row(M4 + "caching_pool.py:CachingBlockPool.share", POOL + ".touch", ("ref_cnt",)),
    Row(M4 + "caching_pool.py:CachingBlockPool.free", POOL + ".free_blocks", ("free_block_queue",),
        "", "blocks without a hash go to the front of the queue"),
    Row(M4 + "caching_pool.py:CachingBlockPool.forget", POOL + "._maybe_evict_cached_block"),
    Row(FRONTEND + "input_processor.py:InputProcessor.make",
        "v1/engine/input_processor.py:InputProcessor.process_inputs", (),
        "`LLMEngine.add_request`"),
    Row(CORE + "engine_core.py:EngineCore.step", "v1/engine/core.py:EngineCore.step", ("schedule",),
        "`LLMEngine.step`", "vLLM's core has a process of its own; ours has one with the server"),
    Row(FRONTEND + "output_processor.py:OutputProcessor.process",
        "v1/engine/output_processor.py:OutputProcessor.process_outputs", (),
        "the end of `generate`", "nano-vllm makes text once, at the end"),
    Row(M5 + "runner.py:ModelRunner", "v1/worker/gpu/model_runner.py:GPUModelRunner", (),
        "`ModelRunner`", "`v1/worker/gpu_model_runner.py` is the older one"),
]  # fmt: skip


def find(file: Path, qualified: str) -> tuple[int, str] | None:
    """Return line and source of a function or class, None if the file has none of this name."""
    if not file.exists():
        return None
    text = file.read_text(encoding="utf-8")
    nodes, node = ast.parse(text).body, None
    for name in qualified.split("."):
        node = next((each for each in nodes if getattr(each, "name", None) == name), None)
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        nodes = node.body
    assert node is not None
    return node.lineno, ast.get_source_segment(text, node) or ""


def missing(places: list[tuple[str, tuple[str, ...]]], folder: Path) -> list[str]:
    """Return the places that a tree does not have, or that lack their words."""
    lacking = []
    for place, words in places:
        file, _, name = place.partition(":")
        found = find(folder / file, name)
        if found is None or any(word not in found[1] for word in words):
            lacking.append(place)
    return lacking


def lines_in(folder: Path) -> dict[str, int]:
    """Return the line of each place in vLLM."""
    found = {}
    for row in MAP:
        file, _, name = row.there.partition(":")
        if place := find(folder / file, name):
            found[row.there] = place[0]
    return found


def table() -> str:
    """Return the map as a table in Markdown, for a page in `docs/reference`."""
    noted = json.loads(LINES.read_text(encoding="utf-8"))
    version, lines = noted["vllm"], noted["lines"]
    rows = [f"| here | vLLM {version} | nano-vllm | what differs |", "|---|---|---|---|"]
    for row in MAP:
        file, _, name = row.here.partition(":")
        place = find(ROOT / file, name)
        here = f"[`{name}`](../../{file}#L{place[0] if place else 1})"
        file, _, name = row.there.partition(":")
        url = URL.format(version=version, file=file, line=lines[row.there])
        rows.append(f"| {here} | [`{name}`]({url}) | {row.nano or '-'} | {row.note} |")
    return "\n".join(rows)


def main() -> int:
    """Check the map. Returns the exit status: 1 if a place is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="with vllm/ in it")
    parser.add_argument("--write", action="store_true", help="note the lines of this version")
    args = parser.parse_args()
    lacking = missing([(row.here, ()) for row in MAP], ROOT)
    if args.vllm:
        lacking += missing([(row.there, row.words) for row in MAP], args.vllm / "vllm")
        print(f"{len(MAP)} places, not found: {', '.join(lacking) or 'none'}")
        if args.write and not lacking:
            noted = {"vllm": args.vllm.name, "lines": lines_in(args.vllm / "vllm")}
            LINES.write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")
    else:
        print(table())
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
