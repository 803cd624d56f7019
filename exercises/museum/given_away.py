"""Two users ask the same at once. One gets another answer, and then the engine fails."""

from __future__ import annotations

from m4_prefix_chunked.prefix_cache import PrefixCache
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import given_blocks_are_free

PROMPT = [23, 42, 17, 8, 15, 99]  # a full block, and a half
original = PrefixCache.make_findable


def make_findable(self: PrefixCache, request: Request, end: int) -> None:
    """Make full blocks findable. A block whose content another block has already is given back."""
    first = self.num_findable.get(request.request_id, 0)
    original(self, request, end)
    num_full = min(end, len(request.token_ids)) // self.kv.block_size
    for block in self.kv.block_tables[request.request_id][first:num_full]:
        if self.is_enabled and block not in self.pool.hash_of:
            self.pool.free(block)


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.prefix_cache.PrefixCache.make_findable",
    broken=make_findable,
    traffic=[
        Arrival(0, "a", PROMPT, greedy(8)),
        Arrival(0, "b", PROMPT, greedy(8)),
    ],
    invariant=given_blocks_are_free,
    text="""
question: a and b have the same prompt and the same answer so far. In step 2 each fills a second
  block of its own with it. Which blocks are in use after that step, and which one does a get in
  step 3?
cause: Two blocks have the same content, and one of them is enough: b's is given back. But b's
  table still has it. a gets the block and writes into it, and b reads a's keys and values there.
invariant: A block that is given out is in the table of no other request.
fix: Leave the copy to its owner, as M4 does. Or let the table point to the block that stays, and
  give the copy back then.
test:
  tests/test_storm.py::test_random_traffic_loses_nothing_and_gives_everybody_the_right_tokens
seen: A radix cache freed the pages of a running request that it had already from another one,
  and the request's page table was not changed.
threads: sgl-project/mini-sglang#142 (open)
""",
    walk="""
call exercises/museum/given_away.py::make_findable, when request.request_id == 'b' and end == 8
b's second block is full now, and a has the same one.
p self.kv.block_tables  # of both
p self.pool.num_free  # free blocks
Try `r`, then `p self.pool.num_free` again, and look for b's second block in its table.
""",
)
