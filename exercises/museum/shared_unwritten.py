"""A request reads blocks that another one has not written yet: this must be a race."""

from __future__ import annotations

from collections.abc import Iterator

from m4_prefix_chunked.prefix_cache import PrefixCache, PrefixHit
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, Finding, Run, greedy

PROMPT = [23, 42, 17, 8, 15, 99, 4, 61]
original = PrefixCache.find


def find(self: PrefixCache, request: Request) -> PrefixHit:
    """Return the longest cached prefix that has been written."""
    hit = original(self, request)
    written = [block for block in hit.blocks if block not in self.pending]
    return hit if written == hit.blocks else PrefixHit(written, len(written) * self.kv.block_size)


def suspicion(run: Run) -> Iterator[Finding]:
    """Yield blocks that are shared in the step that allocates them, before anything is written."""
    for record in run.records:
        new = {block for e in record.events if e.type == "alloc" for block in e.blocks}
        for event in record.events:
            if event.type == "share" and new.intersection(event.blocks):
                yield record.step, f"{event.request_id} shares blocks that this step allocates"


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.prefix_cache.PrefixCache.find",
    broken=find,
    traffic=[Arrival(0, name, [*PROMPT, n], greedy(3)) for n, name in enumerate("abc")],
    invariant=suspicion,
    is_false_alarm=True,
    ask="Which line looks wrong, and is it?",
    text="""
question: b and c share blocks in the very step that allocates them. The change waits for them to
  be written. What does it buy, and what does it cost?
cause: None: it is right. A step goes layer by layer. Each layer writes the keys and values of
  all rows, then all rows attend. When b reads a block in layer 3, a has written it in layer 3.
invariant: Who attends may read what the same forward writes before. Who copies, or keeps a state
  from token to token, may not (exhibit 3).
fix: None. With the change 16 tokens more are computed and 4 blocks more are taken; the tokens
  of both are right.
test: tests/m4/test_hits.py::test_equal_prompts_admitted_in_one_step_share
seen: Reported as a bug, discussed, and closed: within a layer all keys and values are written
  before anybody attends.
threads: GeeeekExplorer/nano-vllm#208 (closed), GeeeekExplorer/nano-vllm#209 (closed),
  GeeeekExplorer/nano-vllm#219 (open)
""",
    walk="""
return m4_prefix_chunked/prefix_cache.py::PrefixCache.find, when request.request_id == 'b' and
  __return__.blocks
b is looked up in the step that will compute a.
p __return__  # what M4 lets it share
p self.pending  # what nobody has written
Then read `paged_attention` in m3_paged/attention.py: the first thing that it does, and the
  second.
""",
)
