"""Every prompt is sent twice, to compare. Now and then the two answers differ."""

from __future__ import annotations

from collections.abc import Iterator

from m4_prefix_chunked.prefix_cache import PrefixCache, PrefixHit
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, Finding, Run, greedy

PROMPT = [23, 42, 17, 8, 15, 99, 4, 61]  # two full blocks


def find(self: PrefixCache, request: Request) -> PrefixHit:
    """Return the longest cached prefix of a request's known tokens."""
    blocks: list[int] = []
    num_known, size = len(request.token_ids), self.kv.block_size
    for index in range(num_known // size):
        block = self.pool.block_of.get(self._hash(request, index))
        if block is None:
            break
        blocks.append(block)
    # The last token is always computed, because its logits are needed.
    return PrefixHit(blocks, min(len(blocks) * size, num_known - 1))


def invariant(run: Run) -> Iterator[Finding]:
    """Yield copies of unwritten blocks. Copies are made before the forward pass, so a block that is
    copied must have been written in an earlier step."""
    for record in run.records:
        new = {block for e in record.events if e.type == "alloc" for block in e.blocks}
        for event in record.events:
            if event.type == "copy_on_write" and event.blocks[0] in new:
                yield record.step, f"block {event.blocks[0]} is copied before it is written"


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.prefix_cache.PrefixCache.find",
    broken=find,
    traffic=[
        Arrival(0, "a", PROMPT, greedy(4)),
        Arrival(0, "b", PROMPT, greedy(4)),
        Arrival(6, "c", PROMPT, greedy(4)),
    ],
    invariant=invariant,
    text="""
question: b copies block 1 and then computes one token. In which order does a step copy and
  compute, and what is in block 1 when it is copied?
cause: A block can be found as soon as the step that will write it is planned. Sharing it is
  right (exhibit 8), but b has all of its tokens there and must write the last one anew: it gets
  a copy. Copies are made before the forward, so it copies a block that nobody has written.
invariant: What is copied was written in an earlier step. Who attends in the same forward may
  rely on less.
fix: If the last block of a whole hit is pending, leave it out: the request computes that block
  itself.
test: tests/m4/test_hits.py::test_equal_prompts_admitted_in_one_step_share
seen: A proposal to keep blocks out of the cache until the step that writes them is over;
  state-space layers got just that.
threads: vllm-project/vllm#37152 (closed), vllm-project/vllm#29387 (merged)
""",
    walk="""
return exercises/museum/equal_prompts.py::find, when request.request_id == 'b' and
  __return__.blocks
b is looked up in the step that will compute a.
p __return__  # what b may share
p self.pending  # blocks that are findable, and that this very step will write
Try `u` and `n` until the copy is planned. Then look at `launch` in m3_paged/runner.py: what does
  it do first?
""",
)
