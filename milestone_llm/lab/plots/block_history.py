"""Which requests held which blocks, step by step, from a trace. Pure data; nothing is drawn.

M3's demo (terminal), `kvmap` and `timeline` (pictures) show it. A trace of m2_batching can be read
too: there a region is one block of `max_model_len` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from milestone_llm.core.kv import NULL_BLOCK
from milestone_llm.trace.records import StepRecord


@dataclass
class BlockState:
    """The block pool during one step."""

    step: int
    num_blocks: int
    block_size: int
    """Tokens of a block."""
    holders: dict[int, list[str]] = field(default_factory=dict)
    """Requests whose block tables contain a block, in order; free blocks are absent."""
    stored: dict[int, int] = field(default_factory=dict)
    """Tokens in each used block after the step."""

    @property
    def shared(self) -> dict[int, list[str]]:
        """Blocks that several requests hold."""
        return {block: names for block, names in self.holders.items() if len(names) > 1}

    @property
    def num_stored_tokens(self) -> int:
        """Tokens in the pool; a token that several requests share counts once."""
        return sum(self.stored.values())

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the blocks in use could hold."""
        return len(self.holders) * self.block_size


def block_history(records: Sequence[StepRecord]) -> Iterator[BlockState]:
    """Yield the state of the pool for every step of a trace of m2_batching or later.

    A row of the batch has its request's block table. A request that runs without a row (the token
    budget was spent) keeps the table it had.
    """
    size = tokens_per_unit(records)
    if not size:  # no block was in use after any step: one step ended all requests
        size = max((row.end for record in records for row in record.batch), default=1)
    # by request, with the number of its stored tokens
    block_tables: dict[str, tuple[list[list[int]], int]] = {}
    for record in records:
        kept = {name: block_tables[name] for name in record.running if name in block_tables}
        block_tables = kept | {
            row.request_id: ([row.blocks, *row.further_blocks], row.end) for row in record.batch
        }
        state = BlockState(record.step, record.kv.total, size)
        for name, (tables, num_tokens) in block_tables.items():
            entries = (entry for table in tables for entry in enumerate(table))
            for index, block in entries:
                if block == NULL_BLOCK:
                    continue
                stored = min(size, max(0, num_tokens - index * size))
                state.holders.setdefault(block, []).append(name)
                state.stored[block] = max(stored, state.stored.get(block, 0))
        yield state


def tokens_per_unit(records: Sequence[StepRecord]) -> int:
    """Return the tokens of a block or region; 0 if none was in use after any step."""
    usage = [record.kv for record in records]
    return max((kv.reserved_tokens // kv.used for kv in usage if kv.used), default=0)


def kv_during_steps(records: Sequence[StepRecord]) -> list[tuple[int, int, int]]:
    """Return for each step the tokens (stored, reserved but empty, free but cached) during it.

    A record's own numbers are those after the step: a request that finished in it has freed its
    memory. Here that memory still counts, so that KV ends where the request's bar ends.
    """
    size, cached_before, during = tokens_per_unit(records), 0, []
    has_blocks = records[0].kv.unit != "token"
    for record, state in zip(records, block_history(records), strict=True):
        cached = record.kv.cached
        if has_blocks:
            stored, reserved = state.num_stored_tokens, state.num_reserved_tokens
            cached, cached_before = (
                min(cached, cached_before) if record.finished else cached,
                cached,
            )
        else:  # a static batch: all rows have the width of the widest, and are freed together
            stored = sum(row.end for row in record.batch if row.phase != "padding")
            width = max((row.end for row in record.batch), default=0)
            reserved = record.kv.reserved_tokens or len(record.batch) * width
        during.append((stored, reserved - stored, cached * size))
    return during
