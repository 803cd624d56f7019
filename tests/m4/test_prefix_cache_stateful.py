"""Any order of admit, compute, fork, free, fail and reset, over a memory that is written and read.

Requests draw their tokens from a tiny alphabet, so that they find each other's blocks all the time.
Whatever is shared, copied, evicted or forgotten meanwhile, each reads its own tokens through its
table, and a block that can be found holds what its hash says.
"""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from m4_prefix_chunked.prefix_cache import PrefixCache, hash_block
from milestone_llm.engine.request import Request
from prefix_helpers import request_of


class CachedMemory(RuleBasedStateMachine):
    """Requests in steps of their own: `num_computed_tokens` says how far each has come."""

    @initialize(num_blocks=st.integers(1, 10), block_size=st.integers(1, 4))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.cache = PrefixCache(num_blocks, block_size)
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.requests: list[Request] = []
        self.num_named = 0
        self.num_saved = 0
        self.content_of: dict[bytes, list[int]] = {}

    def note_content(self, request: Request) -> None:
        """Which hash stands for which tokens, reckoned anew."""
        size = self.cache.block_size
        block_hash = hashlib.sha256(request.sampling_params.cache_salt.encode()).digest()
        for first in range(0, request.num_tokens - size + 1, size):
            tokens = request.token_ids[first : first + size]
            block_hash = hash_block(block_hash, tokens)
            self.content_of[block_hash] = tokens

    def name(self) -> str:
        self.num_named += 1
        return f"r{self.num_named}"

    def write(self, request: Request, end: int) -> None:
        """Compute tokens up to `end`, in a step of its own."""
        self.note_content(request)
        table, size = self.cache.blocks_of(request.request_id), self.cache.block_size
        for position in range(request.num_computed_tokens, end):
            block = table[position // size]
            assert self.cache.pool.ref_counts[block] == 1, "somebody else reads this block"
            self.slots[block][position % size] = request.token_ids[position]
        self.cache.cache_full_blocks(request, request.num_computed_tokens, end)
        request.num_computed_tokens = end
        self.cache.begin_step()

    def raise_in_step(self, request: Request, end: int) -> None:
        """A step that was to compute tokens up to `end`, and wrote rubbish instead."""
        table, size = self.cache.blocks_of(request.request_id), self.cache.block_size
        self.cache.cache_full_blocks(request, request.num_computed_tokens, end)
        for position in range(request.num_computed_tokens, end):
            self.slots[table[position // size]][position % size] = -9
        self.cache.forget_pending()
        self.requests.remove(request)
        self.cache.free(request.request_id)
        self.cache.forget_request(request.request_id)

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "s"]),
        num_tokens=st.integers(1, 12),
        raises=st.sampled_from([False, False, False, True]),
    )
    def admit(self, token_ids: list[int], salt: str, num_tokens: int, raises: bool) -> None:
        """Who is admitted computes at least a token in the same step."""
        request = request_of(self.name(), token_ids, salt=salt)
        blocks, num_cached = self.cache.find_prefix(request)
        assert num_cached == min(len(blocks) * self.cache.block_size, request.num_tokens - 1)
        if not self.cache.can_allocate_with_prefix(request):
            self.cache.forget_request(request.request_id)
            return
        request.num_computed_tokens, copies = self.cache.allocate_with_prefix(request)
        assert request.num_computed_tokens == num_cached
        for source, target in copies:
            self.slots[target] = list(self.slots[source])
        self.num_saved += num_cached
        self.requests.append(request)
        end = min(request.num_tokens, num_cached + num_tokens)
        if raises:
            self.raise_in_step(request, end)
        else:
            self.write(request, end)

    @precondition(lambda self: any(r.num_computed_tokens < r.num_tokens for r in self.requests))
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        unfinished = [r for r in self.requests if r.num_computed_tokens < r.num_tokens]
        request = data.draw(st.sampled_from(unfinished))
        self.write(request, min(request.num_tokens, request.num_computed_tokens + num_tokens))

    @precondition(lambda self: any(r.num_computed_tokens == r.num_tokens for r in self.requests))
    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        done = [r for r in self.requests if r.num_computed_tokens == r.num_tokens]
        request = data.draw(st.sampled_from(done))
        start = request.num_tokens
        if self.cache.can_append(request.request_id, start, start + 1):
            for source, target in self.cache.append(request.request_id, start, start + 1):
                self.slots[target] = list(self.slots[source])
            request.token_ids.append(token)
            self.write(request, start + 1)

    @precondition(lambda self: any(r.num_computed_tokens == r.num_tokens for r in self.requests))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        done = [r for r in self.requests if r.num_computed_tokens == r.num_tokens]
        parent = data.draw(st.sampled_from(done))
        salt = parent.sampling_params.cache_salt
        child = request_of(self.name(), parent.token_ids, salt=salt)
        self.cache.fork(parent.request_id, child.request_id)
        child.num_computed_tokens = parent.num_computed_tokens
        self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.cache.free(request.request_id)
        self.cache.forget_request(request.request_id)

    @precondition(lambda self: any(r.num_computed_tokens < r.num_tokens for r in self.requests))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        unfinished = [r for r in self.requests if r.num_computed_tokens < r.num_tokens]
        request = data.draw(st.sampled_from(unfinished))
        self.raise_in_step(request, request.num_tokens)

    @rule()
    def reset(self) -> None:
        was_unused = not self.requests
        assert self.cache.reset() == was_unused
        if was_unused:
            assert self.cache.pool.block_of == {}

    @invariant()
    def each_request_reads_its_own_tokens(self) -> None:
        for request in self.requests:
            table = self.cache.blocks_of(request.request_id)
            read = [token for block in table for token in self.slots[block]]
            end = request.num_computed_tokens
            assert read[:end] == request.token_ids[:end]

    @invariant()
    def a_block_that_is_found_holds_what_its_hash_says(self) -> None:
        for block, block_hash in self.cache.pool.hash_of.items():
            assert self.slots[block] == self.content_of[block_hash]

    @invariant()
    def the_books_are_right(self) -> None:
        self.cache.check_invariants()
        assert set(self.cache.owners) == {request.request_id for request in self.requests}
        assert set(self.cache.hashes) <= set(self.cache.owners)
        counts = self.cache.counts
        assert counts["saved_tokens"] == self.num_saved
        assert counts["hits"] <= counts["queries"]

    def teardown(self) -> None:
        for request in getattr(self, "requests", ()):
            self.cache.free(request.request_id)
        if hasattr(self, "cache"):
            assert self.cache.pool.num_free == self.cache.pool.num_blocks


TestCachedMemory = CachedMemory.TestCase
TestCachedMemory.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
