"""Any order of allocate, adopt, append, fork, free and reset, over memory that is written and read.

The invariants of the bookkeeping are checked after every operation, and so is what it is for: each
request finds its own tokens through its table, whatever others wrote, copied or freed meanwhile.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from m3_paged.block_manager import BlockManager
from m3_paged.block_pool import BlockPool


class PagedMemory(RuleBasedStateMachine):
    """Requests write tokens, each different, into slots that the manager gives them."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(BlockPool(num_blocks), block_size, events=[])
        self.slots = [[None] * block_size for _ in range(num_blocks)]
        self.tokens: dict[str, list[int]] = {}
        self.num_written = 0
        self.num_named = 0

    def name(self) -> str:
        self.num_named += 1
        return f"r{self.num_named}"

    def write(self, request_id: str, num_tokens: int) -> None:
        """Put new tokens where the table says."""
        table, size = self.manager.block_tables[request_id], self.manager.block_size
        for _ in range(num_tokens):
            position = len(self.tokens[request_id])
            self.num_written += 1
            self.slots[table[position // size]][position % size] = self.num_written
            self.tokens[request_id].append(self.num_written)

    @rule(num_tokens=st.integers(1, 20))
    def allocate(self, num_tokens: int) -> None:
        fits = -(-num_tokens // self.manager.block_size) <= self.manager.pool.num_free
        assert self.manager.can_allocate(num_tokens) == fits
        if fits:
            request_id = self.name()
            self.manager.allocate(request_id, num_tokens)
            self.tokens[request_id] = []
            self.write(request_id, num_tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """Begin with full blocks of somebody else, as many as a prefix cache might find."""
        parent, child = data.draw(st.sampled_from(sorted(self.tokens))), self.name()
        num_blocks = data.draw(st.integers(0, len(self.tokens[parent]) // self.manager.block_size))
        self.manager.adopt(child, self.manager.block_tables[parent][:num_blocks])
        self.tokens[child] = self.tokens[parent][: num_blocks * self.manager.block_size]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        start = len(self.tokens[request_id])
        num_free = self.manager.pool.num_free
        if self.manager.can_append(request_id, start, start + num_tokens):
            copies = self.manager.append(request_id, start, start + num_tokens)
            for source, copy in copies:
                self.slots[copy] = list(self.slots[source])
            self.write(request_id, num_tokens)
        else:  # then it would really not have fitted: copying at most one block, and growing
            table, size = self.manager.block_tables[request_id], self.manager.block_size
            wanted = -(-(start + num_tokens) // size) - len(table)
            begun = table[start // size :]  # the last block, if a token of it is free
            is_shared = any(self.manager.pool.ref_counts[block] > 1 for block in begun)
            assert wanted + is_shared > num_free

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(sorted(self.tokens))), self.name()
        num_free = self.manager.pool.num_free
        self.manager.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])
        assert self.manager.pool.num_free == num_free

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.free(request_id)
        del self.tokens[request_id]

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.tokens = {}

    @invariant()
    def each_request_finds_its_own_tokens(self) -> None:
        size = self.manager.block_size
        for request_id, tokens in self.tokens.items():
            table = self.manager.block_tables[request_id]
            found = [slot for block in table for slot in self.slots[block]][: len(tokens)]
            assert found == tokens
            assert len(table) == -(-len(tokens) // size)

    @invariant()
    def free_and_owned_blocks_make_the_pool(self) -> None:
        pool = self.manager.pool
        held = Counter(block for table in self.manager.block_tables.values() for block in table)
        assert pool.num_free + len(held) == pool.num_blocks
        assert pool.ref_counts == [held[block] for block in range(pool.num_blocks)]
        assert set(pool.free_blocks).isdisjoint(held)
        self.manager.check_invariants()

    def teardown(self) -> None:
        for request_id in list(getattr(self, "tokens", ())):
            self.manager.free(request_id)
        if hasattr(self, "manager"):
            assert self.manager.pool.num_free == self.manager.pool.num_blocks


TestPagedMemory = PagedMemory.TestCase
TestPagedMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
