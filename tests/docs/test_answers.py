"""The questions at the end of each chapter: their answers are what the engines do.

Most are read off the trace of a run with a tiny model: what is computed, and when, depends on
lengths alone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import tiny_model
from m5_kernels.extras.experts.sorting import most_tiles
from m5_kernels.step_graphs import Buckets, StepShape
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem, exactly, serve
from milestone_llm.lab.explorer.positions import Positions
from milestone_llm.serving.replicas.router import BUSIER

DOCS = Path(__file__).parents[2] / "docs"


def run(
    package: str, lengths: Sequence[tuple[int, int]], arrivals: Sequence[int] = (), **options: Any
) -> list[Any]:
    """The records of a run: requests r0, r1, ... with so many tokens in and out.

    Args:
        arrivals: the step before which each comes; all at the start if not given.
        options: fields of the engine's config; `prompts="same"` lets all begin alike.
    """
    is_same = options.pop("prompts", "") == "same"
    engine = importlib.import_module(package).LLMEngine(tiny_model(), trace="memory", **options)
    arriving = zip(lengths, arrivals or [0] * len(lengths), strict=True)
    items = [
        WorkItem([5 if is_same else 5 + index] * num_in, exactly(num_out), arrival_step=arrival)
        for index, ((num_in, num_out), arrival) in enumerate(arriving)
    ]
    serve(engine, items)
    return list(engine.tracer.records)


def positions(records: Sequence[Any]) -> Positions:
    """How many positions a run computed, and how many of them were needed."""
    counted = Positions()
    for record in records:
        counted.take(record)
    return counted


def rows_of(request_id: str, records: Sequence[Any]) -> list[Any]:
    """(step, row) of each step that computed a request."""
    return [
        (record.step, row)
        for record in records
        for row in record.batch
        if row.request_id == request_id
    ]


def num_rows_until_stop(package: str, num_tokens: int, **fields: bool) -> int:
    """Steps with a row for a request whose token `num_tokens` (from 1) ends it."""
    engine = importlib.import_module(package).LLMEngine(tiny_model(), trace="memory", **fields)
    last = engine.generate([[5, 9, 33]], exactly(num_tokens))[0].token_ids[-1]
    engine.tracer.records.clear()
    engine.generate([[5, 9, 33]], SamplingParams(temperature=0, stop_token_ids=[last]))
    return sum(len(record.batch) for record in engine.tracer.records)


def graph_for(num_rows: int) -> int:
    """Rows of the graph that a decode step of M5 replays, for `max_num_seqs=50`."""
    bucket = Buckets(50, 8192).bucket_for(StepShape(num_rows, num_rows, num_rows, 0))
    assert bucket is not None
    return bucket.num_seqs


def limit(loads: Sequence[int], num_tokens: int) -> float:
    """Outstanding tokens above which a replica is clearly busier."""
    return BUSIER * sum(loads) / len(loads) + num_tokens


def chosen(loads: Sequence[int], cached: Sequence[int], num_tokens: int) -> int:
    """The replica with most of a beginning among those that are not clearly busier."""
    most = limit(loads, num_tokens)
    able = [number for number, load in enumerate(loads) if load <= most]
    return max(able, key=lambda number: cached[number])


def m1() -> list[int]:
    pair = positions(run("m1_single", [(4, 3), (10, 8)]))
    third = run("m1_single", [(4, 3), (10, 8), (5, 1)], max_num_seqs=2)
    return [pair.computed, pair.useful, rows_of("r2", third)[0][0]]


def m2() -> list[int]:
    third = run("m2_batching", [(4, 3), (10, 8), (5, 1)], max_num_seqs=2)
    lengths = [(2, 9), (2, 9), (6, 2), (5, 2)]
    step = run("m2_batching", lengths, [0, 0, 3, 3], max_num_batched_tokens=10)[3]
    kv = run("m2_batching", [(20, 2), (30, 2), (40, 2)], max_model_len=100)[0].kv
    num_tokens = sum(row.num_new_tokens for row in step.batch)
    return [rows_of("r2", third)[0][0], num_tokens, kv.reserved_tokens - kv.stored_tokens]


def m3() -> list[int]:
    blocks = run("m3_paged", [(32, 4)], block_size=16)[1].batch[0].blocks
    small: dict[str, Any] = {"block_size": 4, "kv_cache_tokens": 16, "max_model_len": 16}
    first = run("m3_paged", [(4, 6)] * 3, **small)[1].preempted[0]["request_id"]
    return [[7, 2, 5][6 // 4] * 4 + 6 % 4, len(blocks), int(first.removeprefix("r"))]


def m4() -> list[int]:
    equal = run("m4_prefix_chunked", [(48, 2), (48, 2)], [0, 3], prompts="same")
    lengths, arrivals = [(2, 12)] * 3 + [(20, 2)], [0, 0, 0, 4]
    chunks = run("m4_prefix_chunked", lengths, arrivals, max_num_batched_tokens=10)
    small: dict[str, Any] = {"block_size": 16, "kv_cache_tokens": 64, "max_model_len": 64}
    records = run("m4_prefix_chunked", [(44, 5), (20, 2)], [0, 8], **small)
    evicted = [each.blocks for record in records for each in record.events if each.type == "evict"]
    num_chunks = sum(row.phase == "prefill" for _, row in rows_of("r3", chunks))
    return [rows_of("r1", equal)[0][1].start, num_chunks, evicted[0][0]]


ANSWERS: dict[str, Callable[[], list[int]]] = {
    "m0_transformer": lambda: [
        positions(run("m1_single", [(6, 4)])).computed,
        run("m1_single", [(6, 5)])[3].batch[0].end,
        2 * 24 * 2 * 64 * 2,
    ],
    "compute": lambda: [(8 * 2 ** (1 - 3) + 2 ** (3 - 3)), 32 // 8, 40 - (12 - 9)],
    "m1_single": m1,
    "m2_batching": m2,
    "m3_paged": m3,
    "m4_prefix_chunked": m4,
    "m5_kernels": lambda: [
        num_rows_until_stop("m5_kernels", 5, async_scheduling=True),
        graph_for(17) - 17,
        (1 * 4 + 3 * 8) // (1 + 3),
    ],
    "m5_experts": lambda: [round(128 * (1 - (15 / 16) ** 32)), most_tiles(64, 128, 16), 64 // 8],
    "serving": lambda: [len("ab#".removesuffix("#")), (1900 - 1000) // (10 - 1), (8 - 2) // 2],
    "scale": lambda: [
        int(limit((160, 80, 0), 80)),
        chosen((200, 100, 0), (3, 2, 0), 64),
        len({number % 8 for number in range(100)}),
    ],
}


@pytest.mark.parametrize("page", ANSWERS)
def test_an_answer_is_what_the_code_computes(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition("## Check yourself\n")[2], flags=re.MULTILINE)[0]
    answers = re.findall(r"^ *\*\*([\d,]+)\.?\*\*", section, flags=re.MULTILINE)
    assert [int(each.replace(",", "")) for each in answers] == ANSWERS[page]()
