"""Block tables by group of layers, over one pool of blocks.

    window 5, block_size 4, the row computes token 13        blocks of a request
    group 0   tokens 0..13     [ 7 | 2 | 5 | 9 ]             sees all tokens
    group 1   tokens 9..13     [ - | - | 4 | 8 ]             sees 5: the blocks of 0..7 went back

A block of a group with a window goes back as soon as no token that is still to come can see it. Its
place in the table holds `NULL_BLOCK`, so that token t is in entry t // block_size in any group.

A prompt needs no more blocks in such a group than its window and one chunk take. These are reserved
when it is admitted. From then on it takes as many as it gives back: a prompt under way never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from m3_paged.block_manager import BlockManager, Pool
from milestone_llm.core.kv import NULL_BLOCK, BlockTables, KVEvent, tables_of
from milestone_llm.core.request import Request

from .layer_groups import most_entries


class GroupBlockManager(BlockManager):
    """M3's block tables for one group of layers, with blocks that go back.

    Args:
        window: tokens that a token sees, itself included; None: all before it.
        max_tokens: most tokens between the first that is not certain yet and the end of a row.
    """

    def __init__(
        self,
        pool: Pool,
        block_size: int,
        events: list[KVEvent],
        window: int | None,
        max_tokens: int,
    ) -> None:
        super().__init__(pool, block_size, events)
        self.window = window
        self.max_tokens = max_tokens
        self.num_promised = 0
        """Blocks that must stay free. Each table of a group with a window counts for all its
        blocks: it may give a shared block back, which frees none, and needs another in its
        place."""

    def first_needed(self, start: int) -> int:
        """Return the first entry of a table that a row needs whose first token is `start`."""
        return 0 if self.window is None else max(0, start - self.window + 1) // self.block_size

    def num_entries(self, num_tokens: int, start: int) -> int:
        """Return how many entries a table has for so many tokens: all, or as far as the window and
        the longest row after `start` reach."""
        num_all = self.num_blocks_for(num_tokens)
        if self.window is None:
            return num_all
        most = most_entries(self.window, self.max_tokens, self.block_size)
        return min(num_all, self.first_needed(start) + most)

    def num_new(self, request_id: str, start: int, end: int) -> tuple[int, int]:
        """Return how many free blocks tokens `start .. end - 1` need, and how many promised."""
        table = self.block_tables[request_id]
        num_new = max(0, self.num_blocks_for(end) - len(table))
        num_copies = len(self._shared_indices(table, start, end))
        return (num_new + num_copies, 0) if self.window is None else (num_new, num_copies)

    def adopt(self, request_id: str, blocks: list[int]) -> None:
        """Give a request a table that begins with blocks whose content it shares."""
        held = [block for block in blocks if block != NULL_BLOCK]
        for block in held:
            self.num_promised += self.window is not None and self.pool.ref_counts[block] > 0
            self.pool.share(block)
        self.block_tables[request_id] = list(blocks)
        if held:
            self.events.append(KVEvent("share", request_id, held))

    def append(self, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """Make tokens `start .. end - 1` writable, as far as a row can reach: own every block that
        they fall into."""
        end = min(end, self.num_entries(end, start) * self.block_size)
        copies = super().append(request_id, start, end)
        self.num_promised -= len(copies) if self.window is not None else 0
        return copies

    def give_back(self, request_id: str, start: int) -> None:
        """Give back the blocks that no token from `start` on sees."""
        table, index = self.block_tables[request_id], self.first_needed(start)
        if not index or table[index - 1] == NULL_BLOCK:
            return
        gone = []
        while index and table[index - 1] != NULL_BLOCK:
            index -= 1
            gone.append(table[index])
            table[index] = NULL_BLOCK
        self._release(request_id, gone[::-1], gone[::-1])

    def take_as_many(self, request_id: str, start: int, num_tokens: int) -> None:
        """Make a prompt's next tokens writable, in as many blocks as have gone back."""
        self._grow(request_id, self.num_entries(num_tokens, start) * self.block_size)

    def free(self, request_id: str) -> None:
        """Drop a request's table, last block first."""
        table = [each for each in self.block_tables.pop(request_id) if each != NULL_BLOCK]
        self._release(request_id, table[::-1], table)

    def _release(self, request_id: str, blocks: list[int], table: list[int]) -> None:
        for block in blocks:
            self.num_promised -= self.window is not None and self.pool.ref_counts[block] > 1
            self.pool.free(block)
        if table:
            held = [block for block in table if self.pool.ref_counts[block]]
            self.events.append(KVEvent("free", request_id, table, held))

    def reset(self) -> None:
        """Drop all tables, even if the bookkeeping is broken."""
        for request_id, table in self.block_tables.items():
            own = [block for block in table if block != NULL_BLOCK]
            self.events.append(KVEvent("free", request_id, own))
        self.block_tables, self.num_promised = {}, 0
        self.pool.reset()

    def held_by(self, request_id: str) -> list[int]:
        """Return the blocks in a request's table that have not been given back."""
        return [block for block in self.block_tables[request_id] if block != NULL_BLOCK]

    def held(self) -> Counter[int]:
        """Return in how many tables each block is."""
        return Counter(block for name in self.block_tables for block in self.held_by(name))


class GroupedBlocks(BlockManager):
    """Does what M3's `BlockManager` does, in all groups together. A table is one of `BlockTables`:
    that of the first group, with those of the others."""

    def __init__(
        self,
        pool: Pool,
        block_size: int,
        events: list[KVEvent],
        windows: Sequence[int | None],
        max_tokens: int,
    ) -> None:
        super().__init__(pool, block_size, events)
        self.groups = [
            GroupBlockManager(pool, block_size, events, window, max_tokens) for window in windows
        ]
        self.at_rest: dict[str, tuple[int, int]] = {}
        """Until when a decoding request's tables stay as they are: until its first uncertain token
        is the one number, or it writes the token that is the other. Completions of its prompt,
        which share its blocks, have begun before."""

    @property
    def num_available(self) -> int:
        """Free blocks that are not promised to prompts under way."""
        return self.pool.num_free - sum(group.num_promised for group in self.groups)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a request of so many tokens takes, in all groups together, when it
        is admitted."""
        return sum(group.num_entries(num_tokens, 0) for group in self.groups)

    def describe(self, num_tokens: int) -> str:
        """Return how much is wanted and how much there is, in words for people."""
        return f"blocks needed {self.num_blocks_for(num_tokens)}, free {self.num_available}"

    def adopt(self, request_id: str, blocks: list[int]) -> None:
        """Give a request a table in each group that begins with blocks whose content it shares."""
        for group, own in zip(self.groups, tables_of(blocks), strict=True):
            group.adopt(request_id, own)
        first, *further = (group.block_tables[request_id] for group in self.groups)
        tables = BlockTables(first, further)
        self.block_tables[request_id] = self.groups[0].block_tables[request_id] = tables

    def can_append(self, request_id: str, start: int, end: int) -> bool:
        """Whether tokens `start .. end - 1` can be written, growing and copying as needed."""
        counts = [group.num_new(request_id, start, end) for group in self.groups]
        num_new, num_promised = map(sum, zip(*counts, strict=True))
        return not (num_new or num_promised) or num_new <= self.num_available

    def append(self, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """Make tokens `start .. end - 1` writable in all groups. Returns the copies for that."""
        copies = [each for group in self.groups for each in group.append(request_id, start, end)]
        self.num_copies += len(copies)
        return copies

    def is_at_rest(self, request: Request, end: int) -> bool:
        """Whether a request can write the tokens up to `end - 1`, and no block goes back."""
        rest = self.at_rest.get(request.request_id)
        return rest is not None and end <= rest[1] and certain_start(request) < rest[0]

    def note_rest(self, request: Request, end: int) -> None:
        """Note until when tables stay as they are, after tokens `.. end - 1` became writable."""
        start, size = certain_start(request), self.block_size
        next_starts = [
            (group.first_needed(start) + 1) * size + group.window - 1
            for group in self.groups
            if group.window is not None
        ]
        self.at_rest[request.request_id] = min(next_starts), -(-end // size) * size

    def check_rest(self, request: Request) -> None:
        """Assert that a request at rest shares no block that it has still to write."""
        _, end = self.at_rest.get(request.request_id, (0, 0))
        for group in self.groups if request.num_tokens <= end else ():
            last = group.block_tables[request.request_id][end // self.block_size - 1]
            assert self.pool.ref_counts[last] == 1, "a block to be written is shared"

    def give_back(self, request: Request) -> None:
        """Give back what no layer sees from a request's first token on that is not certain.

        A token in flight may be taken back: that of a draft. Then its place is computed again, and
        sees as far back as before.
        """
        start = certain_start(request)
        for group in self.groups:
            group.give_back(request.request_id, start)

    def take_as_many(self, request: Request) -> None:
        """Make the next tokens of a prompt writable, in as many blocks as it gave back."""
        start, num_tokens = certain_start(request), request.num_tokens
        for group in self.groups:
            group.take_as_many(request.request_id, start, num_tokens)

    def written(self, request: Request) -> list[tuple[int, int]]:
        """Return group and entry of each block with KV that a request still sees."""
        start = certain_start(request)
        end = self.groups[0].num_blocks_for(request.num_computed_tokens)
        return [
            (group, index)
            for group, manager in enumerate(self.groups)
            for index in range(manager.first_needed(start), end)
        ]

    def free(self, request_id: str) -> None:
        """Drop a request's tables, last block first."""
        del self.block_tables[request_id]
        self.at_rest.pop(request_id, None)
        for group in self.groups:
            group.free(request_id)

    def reset(self) -> None:
        """Drop all tables, even if the bookkeeping is broken."""
        self.block_tables, self.at_rest = {}, {}
        for group in self.groups:
            group.reset()

    def stored_tokens(self, running: Iterable[Request]) -> int:
        """Return the tokens stored in used blocks, each once a group."""
        filled: dict[int, int] = {}
        for request in running:
            for group in self.groups:
                for index, block in enumerate(group.block_tables[request.request_id]):
                    num_tokens = request.num_computed_tokens - index * self.block_size
                    if block != NULL_BLOCK:
                        num_tokens = max(0, min(num_tokens, self.block_size))
                        filled[block] = max(num_tokens, filled.get(block, 0))
        return sum(filled.values())

    def check_invariants(self) -> None:
        """Assert that reference counts equal table entries, that free + owned == total, and that
        promises can be kept as they were counted."""
        held: Counter[int] = Counter()
        for group in self.groups:
            own = group.held()
            assert not held.keys() & own.keys(), "a block is in tables of two groups"
            held += own
            num_promised = own.total() - len(own) if group.window is not None else 0
            assert num_promised == group.num_promised, "promised blocks miscounted"
            assert group.block_tables.keys() == self.block_tables.keys(), "a table is missing"
        for block, count in enumerate(self.pool.ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} tables, count {count}"
        free = self.pool.free_blocks
        assert len(free) + len(held) == self.pool.num_blocks, "blocks lost"
        assert not any(block in held for block in free), "a block is both free and owned"


def certain_start(request: Request) -> int:
    """Return the first token that a request may still compute, if all drafts in flight fail."""
    return min(request.num_computed_tokens, len(request.token_ids) - 1)
