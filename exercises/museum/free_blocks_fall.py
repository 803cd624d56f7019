"""The server needs a restart every few hours: it says that it has no memory."""

from __future__ import annotations

from m3_paged.kv_cache_manager import KVCacheManager
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import books_balance

original = KVCacheManager.free


def free(self: KVCacheManager, request: Request) -> None:
    """Free a request's blocks."""
    table = self.blocks.block_tables.get(request.request_id, [])
    num_pages = request.num_computed_tokens // self.blocks.block_size
    del table[num_pages:]
    original(self, request)


EXHIBIT = Exhibit(
    milestone="m3_paged",
    place="m3_paged.kv_cache_manager.KVCacheManager.free",
    broken=free,
    traffic=[Arrival(3 * n, "abcd"[n], [30 + n] * 6, greedy(2 + n)) for n in range(4)],
    invariant=books_balance,
    config={"max_model_len": 16, "kv_cache_tokens": 16},
    text="""
question: Four short requests come one after the other; each is alone, and only the last is
  stuck. Follow the free blocks of the steps in which somebody finishes. What do the requests that
  lose a block have in common, and who counts it?
cause: Blocks are counted by dividing the tokens and rounding down: the block that is only partly
  filled is cut off the table before the table is freed. It is in no table and not in the free
  list.
invariant: Free + owned = total, after every step. Where nobody runs, all blocks are free.
fix: Free the table, whatever is in its blocks: what was allocated is given back by the same
  list, not by a count that is worked out again.
test:
  tests/test_storm.py::test_random_traffic_loses_nothing_and_gives_everybody_the_right_tokens
seen: A page that a request had filled only in part was not given back when the request was
  retracted.
threads: sgl-project/sglang#4977 (merged)
""",
    walk="""
call exercises/museum/free_blocks_fall.py::free
a has ended. Its table is about to be freed.
p self.blocks.block_tables['a']  # two blocks
p request.num_computed_tokens // self.blocks.block_size  # how many the method will keep of them
Try `n` twice and `p self.blocks.block_tables`. Then ask who still knows of the block that is gone.
""",
)
