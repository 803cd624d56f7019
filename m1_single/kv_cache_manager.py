"""KV memory of a static batch: a rectangle of rows, each as wide as the widest.

    row 0   |P P P P P d d d|    P prompt, d decode
    row 1   |. . P P P d - -|    . left padding, - its request is finished
             width 8             all of it is freed at once, when the last request is done

Hugging Face's cache holds the KV and grows as needed; this file is only the bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.core.request import Request


class KVCacheManager:
    """Gives a batch its memory, and takes it back as a whole."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        """Stays empty: nothing happens that a trace could show."""
        self.reset()

    def reset(self) -> None:
        """Drop the batch."""
        self.rows: list[Request] = []
        """Requests of the static batch, finished ones included."""
        self.width = 0
        """Tokens per row in the padded KV cache."""

    def allocate(self, batch: Sequence[Request]) -> None:
        """Give a new batch its rows, as wide as the longest prompt."""
        self.rows = list(batch)
        self.width = max(request.num_tokens for request in batch)

    def append(self) -> None:
        """Give every row room for one more token."""
        self.width += 1

    def blocks_of(self, request: Request) -> list[int]:
        """Return nothing: Hugging Face's cache knows where a row's KV is."""
        return []

    def free(self, request: Request) -> None:
        """Take back nothing until the last row is done; then take back the whole batch."""
        if all(row.is_finished for row in self.rows):
            self.reset()

    @property
    def num_used(self) -> int:
        """Tokens that the padded batch has room for."""
        return len(self.rows) * self.width

    def usage(self, running: Sequence[Request], watermark: int) -> KVUsage:
        """Return how full KV memory is, in tokens."""
        return KVUsage(
            unit="token",
            total=self.num_used,  # Hugging Face's cache grows as needed: it has no pool
            used=self.num_used,
            watermark=watermark,
            reserved_tokens=self.num_used,
            stored_tokens=sum(request.num_computed_tokens for request in running),
        )

    def stats(self, running: Sequence[Request]) -> dict[str, object]:
        """Return no figures: M1 has none of its own."""
        return {}

    def check(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """Assert that the batch is empty or still has an unfinished row."""
        unfinished = [request for request in self.rows if not request.is_finished]
        assert running == unfinished, "running rows are the batch's unfinished ones"
        assert not self.rows or unfinished, "a static batch outlived its last request"
