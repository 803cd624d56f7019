"""What 16 streams notice while 20 large schemas are compiled: times between their tokens.

    python -m docs.benchmarks.structured_compile

The server is M4's with the real model's tokenizer. Its steps wait 20 ms and compute nothing, so a
longer gap is the server's own. Schemas come from another process, all at once, each with a request
for one token: once new, and once when they are compiled already, so that the difference is what
compiling costs others.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

from m1_single import SamplingParams
from milestone_llm.command.cli import console, positive
from milestone_llm.lab.bench.measure import percentile
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.load.open_loop import open_request, send_all
from milestone_llm.load.server import door_of, running_server

NUM_STREAMS, NUM_TOKENS, NUM_SCHEMAS, NUM_FIELDS = 16, 250, 20, 400


def schema(number: int) -> dict[str, Any]:
    """Fields of five kinds, with names that no other schema has."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "pattern": "[A-Z][a-z]{2,40}( [0-9]{1,4})?"},
        {"type": "integer", "minimum": -1000 - number, "maximum": 100_000},
        {"enum": [f"word {number} {each}" for each in range(30)]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 20},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 30}}},
    ]
    fields = {f"field_{number}_{each}": kinds[each % 5] for each in range(NUM_FIELDS)}
    return {"type": "object", "properties": fields, "required": list(fields)}


async def ask_with_rule(url: str, number: int) -> tuple[float, float]:
    """When a request with a new schema was sent, and when it was answered."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(number)}}
    sent = time.perf_counter()
    reader, writer = await open_request(
        url, {"prompt": [1, 2, 3], "max_tokens": 1, "response_format": wanted}
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[-600:]
    return sent, time.perf_counter()


def ask_all(url: str, schemas: range) -> float:
    """Seconds until all requests with these schemas are answered."""

    async def together() -> list[tuple[float, float]]:
        return await asyncio.gather(*(ask_with_rule(url, number) for number in schemas))

    asked = asyncio.run(together())
    return max(end for _, end in asked) - min(start for start, _ in asked)


async def run(url: str, schemas: range, other: Executor) -> tuple[list[float], float]:
    """Times between tokens in ms, and the seconds in which the schemas were answered."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    items = [WorkItem([number, 5, 6], params, 0.0) for number in range(NUM_STREAMS)]

    async def with_rules() -> float:
        await asyncio.sleep(1.0)
        if not schemas:
            return 0.0
        return await asyncio.get_running_loop().run_in_executor(other, ask_all, url, schemas)

    outcomes, seconds = await asyncio.gather(send_all(url, items), with_rules())
    assert all(each.is_complete for each in outcomes)
    gaps = [1e3 * (b - a) for each in outcomes for a, b in pairwise(each.times)]
    return gaps, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args()
    arms = ["none", f"{NUM_SCHEMAS} new", f"{NUM_SCHEMAS} compiled before"]
    gaps: dict[str, list[float]] = {arm: [] for arm in arms}
    spans: dict[str, list[float]] = {arm: [] for arm in arms}
    options = ["--max-num-seqs", "40", "--max-model-len", "512"]
    door = door_of("m4_prefix_chunked", 20.0)
    with running_server([*door, *options]) as url, ProcessPoolExecutor(1) as other:
        other.submit(ask_all, url, range(1)).result()  # llguidance reads the vocabulary once
        for number in range(args.rounds):
            first = 1 + NUM_SCHEMAS * number
            for arm in arms:
                schemas = range(first, first if arm == "none" else first + NUM_SCHEMAS)
                times, seconds = asyncio.run(run(url, schemas, other))
                gaps[arm] += times
                spans[arm].append(seconds)
    console.print(
        f"{NUM_STREAMS} streams of {NUM_TOKENS} tokens, steps of 20 ms, {args.rounds} rounds in "
        f"turns; {NUM_SCHEMAS} schemas of {NUM_FIELDS} fields; {machine()}"
    )
    console.print(versions())
    columns = ["schemas", "all answered after, s", "ITL p50, ms", "p99", "max"]
    rows = [
        [
            arm,
            f"{median(spans[arm]):.2f}",
            *(f"{percentile(gaps[arm], p):.1f}" for p in (50, 99, 100)),
        ]
        for arm in arms
    ]
    console.print(table("", columns, rows))


if __name__ == "__main__":
    main()
