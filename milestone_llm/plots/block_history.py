"""Which blocks belonged to whom, step by step, read from a trace. Pure data; nothing is drawn.

`block_map` (terminal) and `kvmap` (picture) show what is gathered here. A trace of m2_batching can
be read as well: there a slot is one block of `max_model_len` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .timeline_spans import check_one_run


@dataclass
class BlockState:
    """The pool while one step is computed."""

    step: int
    num_blocks: int
    block_size: int
    """Tokens of a block."""
    owners: dict[int, list[str]] = field(default_factory=dict)
    """Requests whose tables name a block, in order; free blocks are absent."""
    stored: dict[int, int] = field(default_factory=dict)
    """Tokens in each owned block once the step is done."""

    @property
    def shared(self) -> dict[int, list[str]]:
        """Blocks of several requests."""
        return {block: names for block, names in self.owners.items() if len(names) > 1}

    @property
    def num_free(self) -> int:
        """Blocks of nobody."""
        return self.num_blocks - len(self.owners)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens in the pool; one that several requests share counts once."""
        return sum(self.stored.values())

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the owned blocks could hold."""
        return len(self.owners) * self.block_size


@dataclass
class BlockRun:
    """One block with the same owners from `first` to `last` (indices of states, both included)."""

    block: int
    owners: list[str]
    first: int
    last: int
    stored: list[int]
    """Tokens in it, one number a step."""


def block_history(records: Sequence[dict[str, Any]]) -> list[BlockState]:
    """The pool in every step of a trace.

    A row of the batch brings its request's block table. A request that runs without a row (the
    token budget was spent) keeps the table it had.

    Args:
        records: as `read_jsonl` or `StepRecord.to_dict` give them.

    Raises:
        ValueError: no steps, several runs, or a milestone whose KV has neither blocks nor slots.
    """
    check_one_run(list(records))
    unit = records[0]["kv"]["unit"]
    if unit == "token":
        raise ValueError(
            f"the trace is of {records[0]['milestone']}, whose KV cache has no blocks: "
            "take one of m2_batching or later"
        )
    block_size = max((_tokens_per_block(record["kv"]) for record in records), default=0)
    if not block_size:  # nobody held a block after any step: one that ends all requests at once
        block_size = max((_end(row) for record in records for row in record["batch"]), default=1)
    tables: dict[str, tuple[list[int], int]] = {}  # request -> block table, tokens stored
    states = []
    for record in records:
        rows = {row["request_id"]: (row["blocks"], _end(row)) for row in record["batch"]}
        running = set(record["running"])
        tables = {name: table for name, table in tables.items() if name in running} | rows
        state = BlockState(record["step"], record["kv"]["total"], block_size)
        for name, (blocks, num_tokens) in tables.items():
            for index, block in enumerate(blocks):
                stored = min(block_size, max(0, num_tokens - index * block_size))
                state.owners.setdefault(block, []).append(name)
                state.stored[block] = max(stored, state.stored.get(block, 0))
        states.append(state)
    return states


def block_runs(states: Sequence[BlockState]) -> list[BlockRun]:
    """The same, block by block: equal neighbours in time are one run."""
    runs: list[BlockRun] = []
    open_runs: dict[int, BlockRun] = {}
    for index, state in enumerate(states):
        still_open = {}
        for block, owners in state.owners.items():
            run = open_runs.get(block)
            # Fewer tokens than before: the block was freed and filled anew by the same request.
            if run is None or run.owners != owners or run.stored[-1] > state.stored[block]:
                run = BlockRun(block, owners, index, index, [])
                runs.append(run)
            run.last = index
            run.stored.append(state.stored[block])
            still_open[block] = run
        open_runs = still_open
    return runs


def _tokens_per_block(kv: dict[str, Any]) -> int:
    return kv["reserved_tokens"] // kv["used"] if kv["used"] else 0


def _end(row: dict[str, Any]) -> int:
    return int(row["start"]) + int(row["num_new_tokens"])
