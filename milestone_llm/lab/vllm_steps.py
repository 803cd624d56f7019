"""Records what vLLM's scheduler decides, step by step, in this project's trace format.

    STEP_TRACE=run.jsonl vllm serve MODEL --scheduler-cls vllm_steps.TracedAsyncScheduler
    python -m milestone_llm.lab.explorer run.jsonl -o run.html

The file needs nothing but vLLM: copy it to where vLLM runs, and have its folder on PYTHONPATH.
`TracedAsyncScheduler` is for vLLM's default, async scheduling; `TracedScheduler` is for
`--no-async-scheduling`. Queues and KV memory are one plan ahead with the first, as in m5_kernels.

    STEP_TRACE           where to write; default vllm_steps.jsonl
    STEP_TRACE_MAX_MB    no step is written after so many megabytes; default 100
    STEP_TRACE_PROMPTS   1: also hashes of the prompts' blocks, which show equal beginnings

A trace has ids of requests and of sampled tokens. Blocks are counted from the first that vLLM gives
out: its block 1 is 0 here, since its block 0, the null block, holds nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

try:
    NAME = f"vllm {version('vllm')}"
except PackageNotFoundError:
    NAME = "vllm"
NULL_BLOCKS = 1


class TracedScheduler(Scheduler):
    """vLLM's scheduler, which writes a line a step: for `--no-async-scheduling`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = Path(os.environ.get("STEP_TRACE", "vllm_steps.jsonl"))
        parallel = self.vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            path = path.with_name(f"{path.stem}.{parallel.data_parallel_index}{path.suffix}")
        self._file = path.open("w", encoding="utf-8")
        self._num_left = float(os.environ.get("STEP_TRACE_MAX_MB", "100")) * 1e6
        self._has_prompts = os.environ.get("STEP_TRACE_PROMPTS") == "1"
        self._planned: deque[dict[str, Any]] = deque()
        """Steps that were planned and are not settled."""
        self._number = self._watermark = 0
        self._began: float | None = None
        self._arrived: list[Any] = []
        self._finished: list[dict[str, str]] = []
        self._victims: list[dict[str, str]] = []
        self._refused: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []
        self._cached_free: set[int] = set()
        self._owner: str | None = None
        """The request for which blocks are moved now."""
        self._watch_blocks()

    # -- what vLLM does, with a note of it -------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Queue a request."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            self._arrived.append(request)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        reason = f"no free block for {self._owner}" if self._owner else "reset"
        self._victims.append({"request_id": request.request_id, "reason": reason})
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        reason = str(request.get_finished_reason() or request.status.name.lower())
        self._finished.append({"request_id": request.request_id, "reason": reason})
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the next step."""
        before = {request.request_id for request in self.running}
        self._refused, self._owner = {}, None
        begin = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        end = time.perf_counter()
        self._owner = None
        gone = {each["request_id"] for each in self._victims}
        drafts = output.scheduled_spec_decode_tokens
        rows = []
        for name, num_new in output.num_scheduled_tokens.items():
            request = self.requests[name]
            start = request.num_computed_tokens - num_new
            joins = name not in before or name in gone
            row: dict[str, Any] = {"request_id": name, "start": start, "num_new_tokens": num_new}
            row |= {"num_cached_tokens": start if joins else 0, "blocks": self._table(name)}
            row |= {"num_drafts": len(drafts.get(name, ())), "joins": joins}
            row |= {"num_prompt_tokens": request.num_prompt_tokens}
            row |= {"is_again": request.num_preemptions > 0}
            rows.append(row)
        self._watermark = max(self._watermark, self._num_used())
        step: dict[str, Any] = {"times": (begin, end), "rows": rows, "arrived": self._arrived}
        step |= {"preempted": self._victims, "waiting_reasons": self._reasons(output)}
        self._planned.append(step)
        self._arrived, self._victims = [], []
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in the results of a step, and write its record."""
        begin = time.perf_counter()
        result = super().update_from_output(scheduler_output, model_runner_output)
        end = time.perf_counter()
        self._write(self._planned.popleft(), model_runner_output, begin, end)
        return result

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()
        super().shutdown()

    # -- blocks ----------------------------------------------------------------------------------

    def _watch_blocks(self) -> None:
        """Put a note before or after what changes the block pool."""
        manager = self.kv_cache_manager
        pool = manager.block_pool
        allocate, free = manager.allocate_slots, manager.free
        get_new, touch, give_back = pool.get_new_blocks, pool.touch, pool.free_blocks
        evict, reset = pool._maybe_evict_cached_block, pool.reset_prefix_cache

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._owner = request.request_id
            got = allocate(request, *args, **kwargs)
            if got is None:
                wanted = -(-request.num_tokens // self.block_size)
                self._refused[request.request_id] = (
                    f"no KV memory: blocks needed {wanted}, free {pool.get_num_free_blocks()}"
                )
            return got

        def free_request(request: Any) -> None:
            owner, self._owner = self._owner, request.request_id
            free(request)
            self._owner = owner

        def get_new_blocks(num_blocks: int, *args: Any, **kwargs: Any) -> Any:
            blocks = get_new(num_blocks, *args, **kwargs)
            self._note("alloc", self._owner, blocks)
            self._cached_free.difference_update(block.block_id for block in blocks)
            return blocks

        def touch_blocks(blocks: Any, *args: Any, **kwargs: Any) -> None:
            blocks = list(blocks)
            touch(blocks, *args, **kwargs)
            self._note("share", self._owner, blocks)
            self._cached_free.difference_update(block.block_id for block in blocks)

        def free_blocks(blocks: Any, *args: Any, **kwargs: Any) -> None:
            blocks = [block for block in blocks if not block.is_null]
            give_back(blocks, *args, **kwargs)
            gone = [block for block in blocks if not block.ref_cnt]
            self._cached_free.update(b.block_id for b in gone if b.block_hash is not None)
            held = [block for block in blocks[::-1] if block.ref_cnt]
            self._note("free", self._owner, blocks[::-1], held)

        def evict_block(block: Any) -> bool:
            was_cached = evict(block)
            if was_cached:
                self._cached_free.discard(block.block_id)
                self._note("evict", None, [block])
            return bool(was_cached)

        def reset_prefix_cache() -> bool:
            is_reset = bool(reset())
            if is_reset:
                self._cached_free.clear()
            return is_reset

        manager.allocate_slots, manager.free = allocate_slots, free_request
        pool.get_new_blocks, pool.touch, pool.free_blocks = (
            get_new_blocks,
            touch_blocks,
            free_blocks,
        )
        pool._maybe_evict_cached_block = evict_block
        pool.reset_prefix_cache = reset_prefix_cache

    def _note(self, kind: str, owner: str | None, blocks: Any, held: Any = ()) -> None:
        numbers = [block.block_id - NULL_BLOCKS for block in blocks if not block.is_null]
        if numbers:
            event = {"type": kind, "request_id": owner, "blocks": numbers}
            if held:
                event["held"] = [block.block_id - NULL_BLOCKS for block in held]
            self._events.append(event)

    def _table(self, name: str) -> list[int]:
        """Return a request's blocks, of the first group of layers."""
        blocks = self.kv_cache_manager.get_block_ids(name)[0]
        return [max(0, block - NULL_BLOCKS) for block in blocks]

    def _num_used(self) -> int:
        pool = self.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - NULL_BLOCKS - pool.get_num_free_blocks())

    def _num_stored(self) -> int:
        """Return the number of tokens in used blocks; those of a shared block count once."""
        size, full = self.block_size, set[int]()
        partly: dict[int, int] = {}
        for request in self.running:
            table = self._table(request.request_id)
            num_full, rest = divmod(request.num_computed_tokens, size)
            full.update(table[:num_full])
            if rest and num_full < len(table):
                partly[table[num_full]] = max(rest, partly.get(table[num_full], 0))
        return size * len(full) + sum(n for block, n in partly.items() if block not in full)

    # -- the record ------------------------------------------------------------------------------

    def _reasons(self, output: Any) -> dict[str, str]:
        """Return why the head of the queue was left there, as far as it shows from outside."""
        reasons = {each["request_id"]: each["reason"] for each in self._victims}
        head = next(iter(self.waiting), None)
        if head is not None and head.request_id not in reasons:
            left = self.max_num_scheduled_tokens - output.total_num_scheduled_tokens
            if head.request_id in self._refused:
                reason = self._refused[head.request_id]
            elif len(self.running) >= self.max_num_running_reqs:
                reason = f"max_num_seqs={self.max_num_running_reqs}, running: {len(self.running)}"
            elif self._victims:
                reason = "a request was preempted in this step"
            elif head.status.name not in ("WAITING", "PREEMPTED"):
                reason = head.status.name.lower()
            else:
                reason = f"tokens needed: {head.num_tokens}, left in this step: {left}"
            reasons[head.request_id] = reason
        return reasons

    def _write(self, step: dict[str, Any], result: Any, begin: float, end: float) -> None:
        rows = step["rows"]
        if not (rows or step["preempted"] or step["arrived"] or self._finished):
            return
        planned, launched = step["times"]
        if self._began is None:
            self._began = planned
        batch = [self._row(row, result) for row in rows]
        num_decode = sum(row["num_new_tokens"] for row in batch if row["phase"] == "decode")
        joining = [row for row in rows if row["joins"]]
        pool, used = self.kv_cache_manager.block_pool, self._num_used()
        total = pool.num_gpu_blocks - NULL_BLOCKS
        record = {
            "step": self._number,
            "milestone": NAME,
            "schedule_ms": round((launched - planned) * 1e3, 3),
            "execute_ms": round((begin - launched) * 1e3, 3),
            "update_ms": round((end - begin) * 1e3, 3),
            "batch": batch,
            "num_prefill_tokens": sum(row["num_new_tokens"] for row in batch) - num_decode,
            "num_decode_tokens": num_decode,
            "num_padding_tokens": 0,
            "start_s": round(planned - self._began, 6),
            "waiting": [request.request_id for request in self.waiting],
            "running": [request.request_id for request in self.running],
            "swapped": [],
            "waiting_reasons": step["waiting_reasons"],
            "arrived": [request.request_id for request in step["arrived"]],
            "admitted": [row["request_id"] for row in joining if not row["is_again"]],
            "resumed": [row["request_id"] for row in joining if row["is_again"]],
            "preempted": step["preempted"],
            "finished": self._finished,
            "kv": {
                "unit": "block",
                "total": total,
                "used": used,
                "watermark": self._watermark,
                "reserved_tokens": used * self.block_size,
                "stored_tokens": self._num_stored(),
                "cached": len(self._cached_free),
                "free": total - used,
            },
            "events": self._events,
            "policy": self.policy.value,
            "prompts": {request.request_id: self._prompt(request) for request in step["arrived"]},
        }
        self._number += 1
        self._finished, self._events = [], []
        line = json.dumps(record) + "\n"
        self._num_left -= len(line)
        if self._num_left >= 0:
            self._file.write(line)
            self._file.flush()

    def _row(self, row: dict[str, Any], result: Any) -> dict[str, Any]:
        """Return a row of the record. Accepted draft tokens count as computed, others do not."""
        index = result.req_id_to_index.get(row["request_id"]) if result.sampled_token_ids else None
        tokens = [int(t) for t in result.sampled_token_ids[index]] if index is not None else []
        num_drafts = row["num_drafts"]
        num_accepted = max(0, len(tokens) - 1) if num_drafts else 0
        num_new = row["num_new_tokens"] - num_drafts + num_accepted
        is_decode = row["start"] >= row["num_prompt_tokens"] and num_new == 1 + num_accepted
        own = {
            "request_id": row["request_id"],
            "phase": "decode" if is_decode else "prefill",
            "start": row["start"],
            "num_new_tokens": num_new,
            "num_cached_tokens": row["num_cached_tokens"],
            "sampled_token": tokens[-1] if tokens and tokens[-1] >= 0 else None,
            "blocks": row["blocks"],
        }
        if num_drafts:
            own |= {"num_draft_tokens": num_drafts, "num_accepted_tokens": num_accepted}
        return own

    def _prompt(self, request: Any) -> dict[str, Any]:
        num_full = request.num_prompt_tokens // self.block_size if self._has_prompts else 0
        hashes = [bytes(each).hex()[:8] for each in request.block_hashes[:num_full]]
        facts = {"priority": float(request.priority), "num_tokens": request.num_prompt_tokens}
        return {**facts, "hashes": hashes}


class TracedAsyncScheduler(TracedScheduler, AsyncScheduler):
    """The same over vLLM's scheduler that plans a step ahead: for async scheduling."""
