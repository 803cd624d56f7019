"""M4's guide: a hit, an eviction and a chunk, from the hash of a block to the bill."""

from __future__ import annotations

import m4_prefix_chunked
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.walkthrough.guide import read_guide

GUIDE = read_guide(
    """M4: a hit, an eviction, a chunk

Ten KV blocks of four tokens, and steps of at most twelve tokens (max_num_batched_tokens=12). Four
of the five requests begin with the same eight tokens, which stand for a system prompt: two blocks.

r0 comes alone and pays for them. When it is done, r1 and r2 come; r2 is nothing but those eight
tokens. While both decode, r3 comes with 18 tokens that nobody has seen: too many for one step, and
more blocks than were never used. r4 then goes on with the conversation of r0.

Watch which tokens are computed, and what happens to blocks that no request owns.

# another scheduler, M3's runner
call milestone_llm/core/engine_core.py::StepLoop._step
The loop is M1's, the runner and the block tables are M3's. Finding what is in the cache and cutting
prompts into chunks are decisions: no tensor code changes for them. The prefix cache stands beside
the block tables, over a pool of blocks that remembers their content.
p type(self.scheduler).__module__ == 'm4_prefix_chunked.scheduler'  # who plans
p type(self.runner).__module__ == 'm3_paged.runner'  # who launches
p type(self.scheduler.kv).__module__ == 'm3_paged.block_manager'  # who keeps the block tables
p self.scheduler.prefix_cache.pool is self.scheduler.kv.pool == True  # over one pool
Try `w` (who called us), `ll` (the whole step).

# the name of a block
return m4_prefix_chunked/block_hash.py::hash_block
A full block is known by a hash of its tokens and of its parent, the block before it. The first
block's parent is the hash of the request's cache_salt, so that tenants with different salts never
meet.
p token_ids == [11, 12, 13, 14]  # the first block of r0
p parent.hex()[:8] == 'e3b0c442'  # its parent: the hash of an empty salt
p __return__.hex()[:8] == '96d14081'  # its name (the first 4 of 32 bytes)
Try `ll`, `u` (_hash(), which computes each hash once).

# nothing is known of r0
return m4_prefix_chunked/prefix_cache.py::PrefixCache.find
Before r0 is admitted the scheduler asks for the longest cached prefix, block by block from the
first. The walk ends at the first block that is not there: what comes after it cannot be known
either, since its name contains this one's.
p request.num_tokens == 11  # known tokens of r0
p self.pool.block_of == {}  # names of cached blocks
p (__return__.blocks, __return__.num_tokens) == ([], 0)  # blocks found, tokens saved
Try `ll`, `u` (reason_to_wait(), which needs it to count tokens and blocks).

# two blocks become findable
return m4_prefix_chunked/prefix_cache.py::PrefixCache.make_findable
The step will compute tokens 0 to 10 of r0 and so fill two blocks. They get their names when the
step is planned, not when it is done: a second request with these tokens could join the same step.
Block 2 has three of four tokens and no name.
p end == 11  # tokens that are in the cache after the step
p self.kv.block_tables == {'r0': [0, 1, 2]}  # block tables
p list(self.pool.block_of.values()) == [0, 1]  # blocks that can be found
p self.pending == {0, 1}  # of these, not written yet
p [name.hex()[:8] for name in self.hashes['r0']]
  == ['96d14081', 'af8a0bb7']  # the chain: the first name is part of the second
Try `p self.hashes['r0'][1] == hash_block(self.hashes['r0'][0], [15, 16, 17, 18])`.

# a block filled while decoding
return m4_prefix_chunked/caching_pool.py::CachingBlockPool.remember, when block == 2
In the second step r0 computes the token it has just sampled, and that fills block 2. Generated
tokens are cached like those of a prompt, for in a conversation they come back as part of the next
one.
p self.ref_counts[block] == 1  # tables that hold it: it is in use
p sorted(self.hash_of) == [0, 1, 2]  # blocks that can be found
p __return__ == True  # whether it is the first block of this content
Try `u` (make_findable()), then `p first, end`, `p request.token_ids[8:12]`.

# r0 is done, its blocks are not
return m4_prefix_chunked/scheduler.py::Scheduler.free_memory
The four blocks go to the end of the free list, behind those that were never used, and the last one
goes first: if memory gets short the end of a prefix is given up before its beginning, which more
requests may share. Blocks 0, 1 and 2 keep content and name.
p (request.request_id, request.finish_reason) == ('r0', 'length')  # who is done, and why
p list(self.kv.pool.free_blocks) == [4, 5, 6, 7, 8, 9, 3, 2, 1, 0]  # free
p self.kv.pool.num_used == 0  # blocks in use
p self.kv.pool.num_cached_free == 3  # free, but they can be found
Try `p sorted(self.kv.pool.hash_of)`, `u`, `u` (update()).

# r1 finds two blocks
return m4_prefix_chunked/prefix_cache.py::PrefixCache.find, when request.request_id == 'r1'
r1 begins with the same eight tokens. Two lookups find blocks 0 and 1, though no request owns them;
the third block is not full, so there is nothing to look up.
p request.num_tokens == 10  # known tokens of r1
p (__return__.blocks, __return__.num_tokens) == ([0, 1], 8)  # blocks found, tokens saved
Try `p [name.hex()[:8] for name in self.hashes['r1']]` (the names are those of r0).

# a hit takes blocks off the free list
return m4_prefix_chunked/prefix_cache.py::PrefixCache.allocate, when request.request_id == 'r1'
The cached blocks are shared first, which takes them out of the middle of the free list, and only
then is a new one allocated: in the other order it might have been one of them. r1 starts as if
eight of its tokens had been computed.
p hit.num_tokens == 8  # tokens saved
p self.kv.block_tables == {'r1': [0, 1, 4]}  # block tables
p list(self.pool.free_blocks) == [5, 6, 7, 8, 9, 3, 2]  # free
p __return__ == []  # copies to make
Try `p self.counts`, `u` (_admit()), `ll`.

# all of r2 is cached
return m4_prefix_chunked/prefix_cache.py::PrefixCache.find, when request.request_id == 'r2'
r2 is those eight tokens and no more. Both blocks are found, yet only seven tokens are saved: the
logits of the last one are wanted, so that one is computed again.
p request.num_tokens == 8  # known tokens of r2
p (__return__.blocks, __return__.num_tokens) == ([0, 1], 7)  # blocks found, tokens saved
Try `ll`, `p self.pending`.

# nobody writes into a shared block
return m4_prefix_chunked/prefix_cache.py::PrefixCache.allocate, when request.request_id == 'r2'
The last token of r2 lies in block 1, which r1 holds too. To compute it is to write it, and a
request that writes into a shared block gets a copy first: M3's copy-on-write, as it is.
p __return__ == [(1, 5)]  # copies to make: (from, to)
p self.kv.block_tables == {'r1': [0, 1, 4], 'r2': [0, 5]}  # block tables
p self.pool.ref_counts[:6] == [2, 1, 0, 0, 1, 1]  # tables that hold blocks 0 to 5
Try `p [(e.type, e.request_id, e.blocks) for e in self.pool.events]`.

# three tokens instead of eighteen
return m4_prefix_chunked/scheduler.py::Scheduler.schedule, when len(__return__.rows) == 2
Two prompts of ten and eight tokens, and the step computes three tokens. That is why a cached prompt
gives its first token so much sooner.
p [(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]
  == [('r1', 'prefill', 8, 2), ('r2', 'prefill', 7, 1)]  # id, phase, start, tokens
p [row.num_cached_tokens for row in __return__.rows] == [8, 7]  # tokens saved
p __return__.copies == [(1, 5)]  # to copy before the forward
Try `pp __return__.rows`.

# decode rows come first
return m4_prefix_chunked/scheduler.py::Scheduler._decode, when self.waiting and plan.rows
Two steps later r3 waits with 18 tokens. The decode rows of r1 and r2 take one token each of the
twelve, whoever waits; the rest goes to prompts.
p [row.request.request_id for row in plan.rows] == ['r1', 'r2']  # rows of the step
p [r.request_id for r in self.waiting] == ['r3']  # who waits
p __return__ == 10  # tokens left: 12 - 2
Try `ll`, `u` (schedule(), with the other policy), `ll`.

# an eviction
return m4_prefix_chunked/caching_pool.py::CachingBlockPool.allocate, when self.num_evictions
r3 needs five blocks for all of its tokens, though the first chunk fills fewer: a prompt once begun
must not run out of memory half way. Three were never used, block 3 held tokens without a name; the
fifth is the cached block that has been free the longest.
p __return__ == 2  # the block allocated
p (self.events[-1].type, self.events[-1].blocks) == ('evict', [2])  # what the trace will say
p sorted(self.hash_of) == [0, 1, 4]  # blocks that can still be found
p list(self.free_blocks) == []  # free
Try `w` (from schedule() to here), `p self.num_evictions`.

# a chunk
return m4_prefix_chunked/scheduler.py::Scheduler._add_row, when row.request.request_id == 'r3'
The row of r3 wanted 18 tokens and is cut to the ten that the step has left. Nothing else marks a
chunk: it is a row that ends before the last known token.
p budget == 10  # tokens that the step has left
p (row.start, row.end, row.request.num_tokens) == (0, 10, 18)  # from, to, known
p row.samples == False  # whether a token will be sampled
p __return__ == 10  # tokens taken of the budget
Try `p self.config.long_prefill_token_threshold` (would cut further), `ll`.

# nobody's next token has waited
return m3_paged/runner.py::ModelRunner.launch, when len(plan.rows) == 3
One forward computed a decode row each for r1 and r2 and ten tokens of r3. Two tokens come out of
it. With prefill_policy='prefill_first', r1 and r2 would have waited for both chunks of r3.
p plan.num_tokens == 12  # tokens computed
p sorted(sampled) == ['r1', 'r2']  # who got a token
Try `pp [(row.request.request_id, row.start, row.end) for row in plan.rows]`.

# the last chunk samples
return m4_prefix_chunked/scheduler.py::Scheduler.schedule,
  when [r.request_id for r in self.running] == ['r2', 'r3']
r1 is done. The next step takes the other eight tokens of r3, beside the decode row of r2. The row
reaches the last known token, and so r3 gets its first one.
p [(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]
  == [('r2', 'decode', 10, 1), ('r3', 'prefill', 10, 8)]  # id, phase, start, tokens
p [row.samples for row in __return__.rows] == [True, True]  # which rows sample
Try `p [row.request.num_computed_tokens for row in __return__.rows]`.

# what the eviction costs
return m4_prefix_chunked/prefix_cache.py::PrefixCache.find, when request.request_id == 'r4'
r4 is the conversation of r0 going on: its eleven tokens, its three outputs, and one more word of
the user. All three full blocks were in the cache once; the third went to r3. Four tokens are
computed again: an eviction costs time, never a wrong answer.
p request.num_tokens == 15  # known tokens of r4
p (__return__.blocks, __return__.num_tokens) == ([0, 1], 8)  # blocks found, tokens saved
p self._hash(request, 2) in self.pool.block_of == False  # whether anybody has the third block
Try `p request.token_ids`, `p self.counts`.

# blocks in use are not forgotten
return m4_prefix_chunked/scheduler.py::Scheduler.reset_prefix_cache
After a change of weights, cached keys and values are wrong and must go. While a request holds some
of them that cannot be done, so the reset is refused, and the caller tries again when all are
finished.
p self.kv.pool.num_used == 4  # blocks in use
p __return__ == False  # whether the cache is empty now
Try `ll`, `p self.kv.block_tables`.

# the bill
return milestone_llm/frontend/engine.py::BaseEngine.stats
Of 62 prompt tokens 23 were saved and 39 computed, and no output is different. The hit
rate counts tokens: the share of those looked for that were found. The second eviction was for r4:
block 4, which r1 had filled while decoding.
p __return__['prefix_cache']
  == {'queries': 5, 'hits': 3, 'queried_tokens': 62, 'saved_tokens': 23, 'evictions': 2, 'hit_rate':
    23 / 62}
  # in requests, tokens, and blocks
p __return__['prefill_tokens'] == 39  # prompt tokens computed
p [[f'{row.request_id} +{row.num_new_tokens}' for row in record.batch] for record in
    self.tracer.records]
  == [['r0 +11'], ['r0 +1'], ['r0 +1'], ['r1 +2', 'r2 +1'], ['r1 +1', 'r2 +1'], ['r1 +1', 'r2 +1',
    'r3 +10'], ['r2 +1', 'r3 +8'], ['r4 +7'], ['r4 +1']]
  # rows of every step
p [(e.type, e.request_id, e.blocks) for record in self.tracer.records for e in record.events if
    e.type in ('share', 'copy_on_write', 'evict')]
  == [('share', 'r1', [0, 1]), ('share', 'r2', [0, 1]), ('copy_on_write', 'r2', [1, 5]), ('evict',
    None, [2]), ('share', 'r4', [0, 1]), ('evict', None, [4])]
  # what the trace says of the cache
Try `pp __return__`, `pp self.tracer.records[3].to_dict()`.
"""
)


SYSTEM_PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
QUESTION = [*SYSTEM_PROMPT, 21, 22, 23]


def scenario() -> None:
    """Five requests, each before the step that its part of the story needs."""
    engine = m4_prefix_chunked.LLMEngine(
        "tiny-llama",
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_model_len=32,
        block_size=4,
        kv_cache_tokens=40,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    (first,) = engine.generate([QUESTION], _exactly(3))
    engine.add_request([*SYSTEM_PROMPT, 31, 32], _exactly(3))
    engine.add_request(SYSTEM_PROMPT, _exactly(4))
    for _ in range(2):
        engine.step()
    engine.add_request(list(range(41, 59)), _exactly(1))
    for _ in range(2):
        engine.step()
    engine.add_request([*QUESTION, *first.token_ids, 24], _exactly(2))
    engine.step()
    engine.reset_prefix_cache()
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
