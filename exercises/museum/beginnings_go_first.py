"""The cache is full of blocks, and nothing is found in it."""

from __future__ import annotations

from m3_paged.block_manager import BlockManager
from milestone_llm.core.kv import KVEvent

from .exhibit import Arrival, Exhibit, greedy
from .invariants import beginnings_outlive

PROMPT = [23, 42, 17, 8, 15, 99, 4, 61, 5, 70, 31, 12]  # three full blocks


def free(self: BlockManager, request_id: str) -> None:
    """Drop a request's table."""
    table = self.block_tables.pop(request_id)
    for block in table:
        self.pool.free(block)
    held = [block for block in table if self.pool.ref_counts[block]]
    self.events.append(KVEvent("free", request_id, table, held))


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m3_paged.block_manager.BlockManager.free",
    broken=free,
    traffic=[
        Arrival(0, "a", [*PROMPT, 3], greedy(2)),
        Arrival(3, "b", list(range(100, 113)), greedy(2)),
        Arrival(6, "a again", [*PROMPT, 9], greedy(2)),
    ],
    invariant=beginnings_outlive,
    config={"max_model_len": 24, "kv_cache_tokens": 24},
    text="""
question: Six blocks, and b needs four. Two of a's three blocks stay findable, or so the counter
  says. Which one is evicted, and what is the other two's worth then?
cause: Blocks are given back from the first to the last, so the first has been free the longest
  and is evicted first. A block's name covers all tokens before it, and a lookup begins at the
  first block: without it the two others are never found again. They only take room.
invariant: No block is evicted while a longer beginning that contains it is cached.
fix: Give a table back from its end, so that the last block is evicted first.
test: tests/m4/test_hits.py::test_evicted_blocks_are_missed_last_block_first
seen: In a radix tree, the part that a request had just matched was not marked as used when its
  node was split, and was evicted before what hangs on it.
threads: sgl-project/mini-sglang#124 (merged), sgl-project/sglang#24892 (closed)
""",
    walk="""
call exercises/museum/beginnings_go_first.py::free, when request_id == 'a'
a has ended. Its blocks become free.
p self.block_tables['a']  # first to last
p list(self.pool.free_blocks)  # the first of these goes first
Try `r`, then `p list(self.pool.free_blocks)`: which of a's blocks will be evicted first?
""",
)
