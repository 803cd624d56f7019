"""Any order of admit, compute, fork, free, go wrong, reset, over a memory that is written and read.

Requests draw their tokens from a tiny alphabet, so that they find each other's blocks all the time.
Whatever is shared, copied, evicted or forgotten meanwhile, each reads its own tokens through its
table, and a block that can be found holds what its hash says.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from milestone_llm.core.request import Request
from milestone_llm.frontend.block_hashes import hash_blocks
from prefix_helpers import make_cache, request_of


class CachedMemory(RuleBasedStateMachine):
    """Requests in steps of their own: `num_computed_tokens` says how far each has come."""

    @initialize(num_blocks=st.integers(1, 10), block_size=st.integers(1, 4))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.cache = make_cache(num_blocks, block_size)
        self.kv = self.cache.kv
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.requests: list[Request] = []
        self.num_named = 0
        self.num_saved = 0
        self.content_of: dict[bytes, list[int]] = {}

    def note_content(self, request: Request) -> None:
        """Which hash stands for which tokens, reckoned anew."""
        size = self.kv.block_size
        hashes = hash_blocks(request.token_ids, size, request.sampling_params.cache_salt)
        for index, block_hash in enumerate(hashes):
            self.content_of[block_hash] = request.token_ids[index * size : (index + 1) * size]

    def name(self) -> str:
        self.num_named += 1
        return f"r{self.num_named}"

    def write(self, request: Request, end: int) -> None:
        """Compute tokens up to `end`, in a step of its own."""
        self.note_content(request)
        table, size = self.kv.block_tables[request.request_id], self.kv.block_size
        for position in range(request.num_computed_tokens, end):
            block = table[position // size]
            assert self.cache.pool.ref_counts[block] == 1, "somebody else reads this block"
            self.slots[block][position % size] = request.token_ids[position]
        self.cache.make_findable(request, end)
        request.num_computed_tokens = end
        self.cache.begin_step()

    def go_wrong(self, request: Request, end: int) -> None:
        """Compute tokens up to `end`, and find that their KV is no number."""
        table, size = self.kv.block_tables[request.request_id], self.kv.block_size
        self.cache.make_findable(request, end)
        for position in range(request.num_computed_tokens, end):
            self.slots[table[position // size]][position % size] = -9
        request.finish("error")
        self.cache.forget_blocks(request)
        self.drop(request)

    def drop(self, request: Request) -> None:
        self.requests.remove(request)
        self.kv.free(request.request_id)
        if not request.is_finished:
            request.finish("abort")
        self.cache.release(request)

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "s"]),
        num_tokens=st.integers(1, 12),
        is_bad=st.sampled_from([False, False, False, True]),
    )
    def admit(self, token_ids: list[int], salt: str, num_tokens: int, is_bad: bool) -> None:
        """Who is admitted computes at least a token in the same step."""
        request = request_of(self.name(), token_ids, salt=salt)
        hit = self.cache.find(request)
        num_cached = hit.num_tokens
        assert num_cached == min(len(hit.blocks) * self.kv.block_size, request.num_tokens - 1)
        if not self.cache.can_allocate(request, hit):
            request.finish("abort")
            self.cache.release(request)
            return
        for source, target in self.cache.allocate(request, hit):
            self.slots[target] = list(self.slots[source])
        request.num_computed_tokens = num_cached
        self.num_saved += num_cached
        self.requests.append(request)
        end = min(request.num_tokens, num_cached + num_tokens)
        if is_bad:
            self.go_wrong(request, end)
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
        if self.kv.can_append(request.request_id, start, start + 1):
            for source, target in self.kv.append(request.request_id, start, start + 1):
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
        self.kv.fork(parent.request_id, child.request_id)
        child.num_computed_tokens = parent.num_computed_tokens
        self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: any(r.num_computed_tokens < r.num_tokens for r in self.requests))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Spoil a request whose tokens are not all computed yet."""
        unfinished = [r for r in self.requests if r.num_computed_tokens < r.num_tokens]
        request = data.draw(st.sampled_from(unfinished))
        self.go_wrong(request, request.num_tokens)

    @rule(is_sure=st.integers(0, 5))
    def reset(self, is_sure: int) -> None:
        """Not too often, or there is never much to go wrong."""
        if is_sure == 0:
            self.kv.reset()
            self.cache.reset_requests()
            self.requests = []
            assert self.cache.pool.block_of == self.cache.hashes == {}

    @invariant()
    def each_request_reads_its_own_tokens(self) -> None:
        for request in self.requests:
            table = self.kv.block_tables[request.request_id]
            read = [token for block in table for token in self.slots[block]]
            end = request.num_computed_tokens
            assert read[:end] == request.token_ids[:end]

    @invariant()
    def a_block_that_is_found_holds_what_its_hash_says(self) -> None:
        for block, block_hash in self.cache.pool.hash_of.items():
            assert self.slots[block] == self.content_of[block_hash]

    @invariant()
    def the_books_are_right(self) -> None:
        self.kv.check_invariants()
        self.cache.pool.check_invariants()
        names = {request.request_id for request in self.requests}
        assert set(self.kv.block_tables) == names
        assert set(self.cache.hashes) <= names
        assert set(self.cache.num_findable) <= names
        counts = self.cache.counts
        assert counts["saved_tokens"] == self.num_saved
        assert counts["hits"] <= counts["queries"]

    def teardown(self) -> None:
        for request in getattr(self, "requests", ()):
            self.kv.free(request.request_id)
        if hasattr(self, "cache"):
            assert self.cache.pool.num_free == self.cache.pool.num_blocks


TestCachedMemory = CachedMemory.TestCase
TestCachedMemory.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
