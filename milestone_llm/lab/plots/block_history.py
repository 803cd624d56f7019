"""Which blocks belonged to whom, step by step, read from a trace. Pure data; nothing is drawn.

`block_map` (terminal) and `kvmap` (picture) show what is gathered here. A trace of m2_batching can
be read as well: there a slot is one block of `max_model_len` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .timeline_spans import Record, check_one_run, row_end, tokens_per_unit


@dataclass
class BlockState:
    """The pool while one step is computed."""

    step: int
    num_blocks: int
    block_size: int
    """Tokens of a block."""
    holders: dict[int, list[str]] = field(default_factory=dict)
    """Requests whose block tables name a block, in order; free blocks are absent."""
    stored: dict[int, int] = field(default_factory=dict)
    """Tokens in each block in use once the step is done."""

    @property
    def shared(self) -> dict[int, list[str]]:
        """Blocks of several requests."""
        return {block: names for block, names in self.holders.items() if len(names) > 1}

    @property
    def num_free(self) -> int:
        """Blocks of nobody."""
        return self.num_blocks - len(self.holders)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens in the pool; one that several requests share counts once."""
        return sum(self.stored.values())

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the blocks in use could hold."""
        return len(self.holders) * self.block_size


@dataclass
class BlockRun:
    """One block with the same holders from index `first` of the states on."""

    block: int
    holders: list[str]
    first: int
    stored: list[int]
    """Tokens in it, one number a step."""

    @property
    def last(self) -> int:
        """Index of the last state, included."""
        return self.first + len(self.stored) - 1


def block_history(records: Sequence[Record]) -> list[BlockState]:
    """The pool in every step of a trace.

    A row of the batch brings its request's block table. A request that runs without a row (the
    token budget was spent) keeps the table it had.

    Raises:
        ValueError: no steps, several runs, or a milestone whose KV has neither blocks nor slots.
    """
    check_one_run(records)
    if records[0]["kv"]["unit"] == "token":
        raise ValueError(
            f"the trace is of {records[0]['milestone']}, whose KV cache has no blocks: "
            "take one of m2_batching or later"
        )
    size = tokens_per_unit(records)
    if not size:  # no block was in use after any step: one that ends all requests at once
        size = max((row_end(row) for record in records for row in record["batch"]), default=1)
    block_tables: dict[str, tuple[list[int], int]] = {}  # by request, with its tokens stored
    states = []
    for record in records:
        kept = {name: block_tables[name] for name in record["running"] if name in block_tables}
        rows = {row["request_id"]: (row["blocks"], row_end(row)) for row in record["batch"]}
        block_tables = kept | rows
        state = BlockState(record["step"], record["kv"]["total"], size)
        for name, (block_table, num_tokens) in block_tables.items():
            for index, block in enumerate(block_table):
                stored = min(size, max(0, num_tokens - index * size))
                state.holders.setdefault(block, []).append(name)
                state.stored[block] = max(stored, state.stored.get(block, 0))
        states.append(state)
    return states


def block_runs(states: Sequence[BlockState]) -> list[BlockRun]:
    """The same, block by block: equal neighbours in time are one run."""
    runs: list[BlockRun] = []
    latest: dict[int, BlockRun] = {}
    for index, state in enumerate(states):
        for block, holders in state.holders.items():
            run, stored = latest.get(block), state.stored[block]
            # Fewer tokens than before: the block was freed and filled anew by the same request.
            is_same = run and run.last == index - 1 and run.holders == holders
            if run is None or not is_same or run.stored[-1] > stored:
                run = latest[block] = BlockRun(block, holders, index, [])
                runs.append(run)
            run.stored.append(stored)
    return runs
