"""Any order of allocate, hit, free, remember, forget and reset, beside a model of plain lists."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from m4_prefix_chunked.caching_pool import CachingBlockPool


class PoolAndModel(RuleBasedStateMachine):
    """The model: a list of free blocks, a list of owners' blocks, and content by block."""

    @initialize(num_blocks=st.integers(1, 8))
    def build(self, num_blocks: int) -> None:
        self.pool = CachingBlockPool(num_blocks, events=[])
        self.free_list = list(range(num_blocks))
        self.held: list[int] = []
        self.content: dict[int, bytes] = {}
        self.evicted: list[int] = []

    @precondition(lambda self: self.free_list)
    @rule()
    def allocate(self) -> None:
        expected = self.free_list.pop(0)
        assert self.pool.allocate() == expected
        self.held.append(expected)
        if self.content.pop(expected, None) is not None:
            self.evicted.append(expected)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        assert self.pool.block_of[self.content[block]] == block
        self.pool.share(block)
        self.held.append(block)
        if block in self.free_list:
            self.free_list.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.free(block)
        self.held.remove(block)
        if block not in self.held:
            self.free_list.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), content=st.integers(0, 9))
    def remember(self, data: st.DataObject, content: int) -> None:
        block, block_hash = data.draw(st.sampled_from(self.held)), bytes([content])
        is_new = block not in self.content and block_hash not in self.content.values()
        assert self.pool.remember(block, block_hash) == is_new
        if is_new:
            self.content[block] = block_hash

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.forget(block)
        del self.content[block]

    @rule(is_sure=st.integers(0, 9))
    def reset(self, is_sure: int) -> None:
        """Not too often: a pool that has just been reset has nothing to go wrong."""
        if is_sure == 0:
            self.pool.reset()
            self.free_list = list(range(self.pool.num_blocks))
            self.held, self.content = [], {}

    @invariant()
    def pool_and_model_agree(self) -> None:
        pool = self.pool
        assert list(pool.free_blocks) == self.free_list
        assert pool.ref_counts == [self.held.count(block) for block in range(pool.num_blocks)]
        assert pool.hash_of == self.content
        assert {block: h for h, block in pool.block_of.items()} == self.content
        assert pool.num_cached_free == len(set(self.content) & set(self.free_list))
        assert pool.num_free + len(set(self.held)) == pool.num_blocks
        assert [block for event in pool.events for block in event.blocks] == self.evicted
        assert pool.num_evictions == len(self.evicted)
        pool.check_invariants()


TestPoolAndModel = PoolAndModel.TestCase
TestPoolAndModel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
