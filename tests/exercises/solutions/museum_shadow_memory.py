"""A shadow of KV memory. Blocks that are freed need no thought: what was written stays there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milestone_llm.trace.records import StepRecord


def misreads(
    records: Sequence[StepRecord], tokens: Mapping[str, Sequence[int]], block_size: int
) -> list[tuple[int, str]]:
    memory: dict[tuple[int, int], tuple[int, ...]] = {}
    found = []
    for record in records:
        for event in record.events:
            if event.type == "copy_on_write":
                source, target = event.blocks
                for offset in range(block_size):
                    memory[target, offset] = memory.get((source, offset), ())
        for row in record.batch:
            for position in range(row.start, row.end):
                slot = row.blocks[position // block_size], position % block_size
                memory[slot] = tuple(tokens[row.request_id][: position + 1])
        for row in record.batch:
            own = tuple(tokens[row.request_id])
            if any(
                memory.get((row.blocks[p // block_size], p % block_size)) != own[: p + 1]
                for p in range(row.end)
            ):
                found.append((record.step, row.request_id))
    return found
