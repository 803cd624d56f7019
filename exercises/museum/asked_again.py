"""Asked for a second time, a prompt gets an answer that begins with a word of another one."""

from __future__ import annotations

from m4_prefix_chunked.prefix_cache import PrefixCache, PrefixHit
from milestone_llm.core.request import Request

from .exhibit import UNCHECKED, UNCHECKED_SETTING, Arrival, Exhibit, greedy
from .invariants import rows_compute

PROMPT = [23, 42, 17, 8, 15, 99, 4, 61]  # two full blocks


def find(self: PrefixCache, request: Request) -> PrefixHit:
    """Return the longest cached prefix of a request's known tokens."""
    blocks: list[int] = []
    size = self.kv.block_size
    for index in range(len(request.token_ids) // size):
        block = self.pool.block_of.get(self._hash(request, index))
        if block is None or block in self.pending:
            break
        blocks.append(block)
    return PrefixHit(blocks, len(blocks) * size)


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.prefix_cache.PrefixCache.find",
    broken=find,
    traffic=[
        Arrival(0, "a", PROMPT, greedy(3)),
        Arrival(2, "other", [7, 77, 107], greedy(8)),
        Arrival(5, "again", PROMPT, greedy(3)),
    ],
    invariant=rows_compute,
    both=UNCHECKED,
    setting=UNCHECKED_SETTING,
    text="""
question: Compare the two rows of step 5. What was computed for `again`, and where does its token
  come from?
cause: The whole prompt is found, so the row has no token. Logits are taken after the last token
  of each row: for an empty row that is the last token of the row before it.
invariant: Every row of a plan computes at least one token. The last known token is always
  computed: its logits are wanted.
fix: If all known tokens are cached, count one less as saved. Its block is written again: copied
  first, if others hold it.
test: tests/m4/test_hits.py::test_of_a_wholly_cached_prompt_exactly_one_token_is_computed
seen: A prompt that is all in the cache leaves nothing to compute, and no logits to sample from.
  Some engines crash, others take the logits that are there.
threads: ggml-org/llama.cpp#1609 (merged), ggml-org/llama.cpp#1585 (closed),
  GeeeekExplorer/nano-vllm#144 (open), GeeeekExplorer/nano-vllm#199 (closed)
""",
    walk="""
return exercises/museum/asked_again.py::find, when request.request_id == 'again'
The prompt was computed before.
p __return__.num_tokens  # saved
p len(request.token_ids)  # known
Try `u` twice: what becomes of a request of which nothing is left to compute?
""",
)
