"""One step of a scheduler, M4's or vLLM's, in the same words; and the device that computes it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from .traffic import next_token


@dataclass
class Row:
    """Tokens `start .. end - 1` of a request; draft tokens are the last of them."""

    name: str
    start: int
    end: int
    blocks: list[int]
    drafts: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        guesses = f"?{len(self.drafts)}" if self.drafts else ""
        return f"{self.name}[{self.start}:{self.end}]{guesses}@{','.join(map(str, self.blocks))}"


@dataclass
class Step:
    """What a scheduler decided, and how its queues look after the step."""

    rows: list[Row]
    admitted: list[str]
    resumed: list[str]
    preempted: list[str]
    num_used: int
    """Blocks in use once the step is planned."""
    finished: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the step as a line of a golden plan: `a[0:4]@0,2 b[0:3]@1 | +b -c`."""
        notes = [f"+{name}" for name in self.admitted] + [f"^{name}" for name in self.resumed]
        notes += [f"-{name}" for name in self.preempted]
        return " ".join(map(str, self.rows)) + (f" | {' '.join(notes)}" if notes else "")

    def differences(self, other: Step, to_the_block: bool) -> list[str]:
        """Return the names of what differs. `to_the_block`: the order of rows and the numbers of
        blocks count, too."""
        mine, others = self._facts(to_the_block), other._facts(to_the_block)
        return [name for name, fact in mine.items() if fact != others[name]]

    def _facts(self, to_the_block: bool) -> dict[str, object]:
        order = list if to_the_block else sorted
        facts: dict[str, object] = {
            "rows": order((row.name, row.start, row.end, len(row.drafts)) for row in self.rows),
            "admitted": order(self.admitted),
            "resumed": order(self.resumed),
            "preempted": order(self.preempted),
            "finished": sorted(self.finished),
            "running": order(self.running),
            "waiting": self.waiting,
        }
        if to_the_block:
            facts["blocks"] = [row.blocks for row in self.rows]
            facts["used"] = self.num_used
        return facts


class Device:
    """A made-up model over blocks of slots. It checks that what a row reads has been written.

    Args:
        block_size: slots of a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.known: dict[str, list[int]] = {}
        """Each request's tokens, those under way included."""
        self.seeds: dict[str, int] = {}
        self.unwritten: list[tuple[str, int]] = []
        """Requests, and the first position of a row that read what was never written there."""

    def add(self, name: str, tokens: Sequence[int], seed: int) -> None:
        """Note a request's prompt. Completions of a prompt differ by their seed."""
        self.known[name], self.seeds[name] = list(tokens), seed

    def run(
        self,
        rows: Sequence[Row],
        samples: dict[str, list[str]],
        copies: Sequence[tuple[int, int]] = (),
    ) -> dict[str, list[int]]:
        """Write the KV of all rows, read all contexts back, sample.

        Args:
            samples: for each row, the requests that get a token from it.

        Returns:
            The tokens of each request that samples: accepted draft tokens, and one.
        """
        size = self.block_size
        for source, target in copies:
            for offset in range(size):
                self.slots[target, offset] = self.slots.get((source, offset), 0)
        kept = {row.name: [*self.known[row.name], *row.drafts] for row in rows}
        names = {name: _names(tokens) for name, tokens in kept.items()}
        for row in rows:
            for position in range(row.start, row.end):
                slot = row.blocks[position // size], position % size
                self.slots[slot] = names[row.name][position]
        for row in rows:
            for position in range(row.end):
                slot = row.blocks[position // size], position % size
                if self.slots.get(slot) != names[row.name][position]:
                    self.unwritten.append((row.name, position))
                    break
        return {name: self._sample(name, row.drafts) for row in rows for name in samples[row.name]}

    def _sample(self, name: str, drafts: Sequence[int]) -> list[int]:
        known, seed, tokens = self.known[name], self.seeds[name], list[int]()
        for draft in [*drafts, None]:
            tokens.append(next_token([*known, *tokens], seed))
            if tokens[-1] != draft:
                break
        known += tokens
        return tokens


def _names(tokens: Sequence[int]) -> list[int]:
    """Return what stands for the KV of each token: it depends on it and on all before it."""
    found, last = [], 0
    for token in tokens:
        last = zlib.crc32(bytes([max(token, 0)]), last)
        found.append(last)
    return found
