"""After a long document was uploaded, short questions get answers about it."""

from __future__ import annotations

from m4_prefix_chunked.caching_pool import CachingBlockPool
from milestone_llm.core.kv import KVEvent

from .exhibit import Arrival, Exhibit, greedy
from .invariants import only_full_blocks_are_found

PROMPT = [23, 42, 17, 8, 15, 99, 4, 61]


def allocate(self: CachingBlockPool) -> int:
    """Take the block that has been free the longest."""
    block, _ = self.free_blocks.popitem(last=False)
    if block in self.hash_of:
        self.num_evictions += 1
        self.num_cached_free -= 1
        self.events.append(KVEvent("evict", None, [block]))
    self.ref_counts[block] = 1
    return block


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.caching_pool.CachingBlockPool.allocate",
    broken=allocate,
    traffic=[
        Arrival(0, "a", PROMPT, greedy(3)),
        Arrival(4, "b", list(range(100, 117)), greedy(3)),
        Arrival(8, "c", [*PROMPT, 5], greedy(3)),
    ],
    invariant=only_full_blocks_are_found,
    config={"max_model_len": 24, "kv_cache_tokens": 24},
    text="""
question: c finds two blocks of a's prompt. Which of them is still a's? In step 5, count the
  blocks that can have a name: those that were computed to their last slot.
cause: A block that is taken off the free list keeps its name. b writes one token into block 1,
  and c finds b's keys and values under the name of a's tokens. (A `forget` that leaves names
  where they are gives the same trace, and counts.)
invariant: A block's hash names what was last written into it. `evict` means: nobody finds it any
  more.
fix: When a block is given out, its hash is dropped in both directions.
test: tests/m4/test_hits.py::test_evicted_blocks_are_missed_last_block_first
seen: The table from hash to block kept the old entry of a block that was given to another
  request.
threads: GeeeekExplorer/nano-vllm#163 (open), ovg-project/kvcached#362 (closed),
  ovg-project/kvcached#363 (merged)
""",
    walk="""
return exercises/museum/anothers_words.py::allocate, when __return__ in self.hash_of
b takes a block that was a's.
p __return__  # the block
p self.hash_of[__return__] in self.block_of  # whether it is still found by its old name
Try `c`, and on another day put a `breakpoint()` into PrefixCache.find.
""",
)
