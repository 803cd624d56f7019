"""The first answer of a chat is always right. In some chats the second is nonsense."""

from __future__ import annotations

from m4_prefix_chunked.kv_cache_manager import KVCacheManager
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import only_full_blocks_are_found

original = KVCacheManager.free


def free(self: KVCacheManager, request: Request) -> None:
    """Free a request's blocks. All full ones can be found later, those of prompt and answer."""
    if request.request_id in self.blocks.block_tables:
        self.prefix_cache.make_findable(request, len(request.token_ids))
    original(self, request)


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.kv_cache_manager.KVCacheManager.free",
    broken=free,
    traffic=[
        Arrival(0, "one", [23, 42, 17, 8, 15], greedy(3)),
        Arrival(1, "two", [7, 77], greedy(3)),
        Arrival(5, "one+", [99, 4, 61], greedy(3), after="one"),
        Arrival(5, "two+", [99, 4, 61], greedy(3), after="two"),
    ],
    invariant=only_full_blocks_are_found,
    text="""
question: Both chats go on in the same way; `one+` is wrong, `two+` is not. Follow the cached
  blocks from step 2 on. How many tokens had `one` computed when it finished, and how many does
  `one+` find?
cause: Block 1 is named by eight tokens when `one` ends. The eighth was sampled last: nobody
  computed its keys and values, for there was no further step. It shows only where prompt and
  answer end with a full block. (A `make_findable` that ignores its `end` gives the same trace,
  and counts. A prompt that is computed in chunks would tell the two apart.)
invariant: The tokens that name a block are tokens whose KV is in it: no more than
  num_computed_tokens.
fix: Make findable up to num_computed_tokens. It is one less than the tokens known.
test: tests/m4/test_hits.py::test_the_last_token_of_an_output_has_no_kv_and_completes_no_block
seen: A server's list of cached tokens and its KV memory were out of step, so a later request
  relied on positions that were not there.
threads: ggml-org/llama.cpp#13533 (merged), ggml-org/llama.cpp#13484 (closed)
""",
    walk="""
call exercises/museum/second_turn.py::free, when request.request_id == 'one'
The first turn has ended.
p len(request.token_ids)  # known
p request.num_computed_tokens  # with keys and values
Try `n`, `n` and `p self.prefix_cache.pool.hash_of`: how many blocks can be found?
""",
)
