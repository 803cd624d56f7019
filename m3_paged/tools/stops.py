"""M3's guide: a block allocated, a table that grows, preemption, copy-on-write, swap."""

from __future__ import annotations

import m3_paged
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.walkthrough.guide import read_guide

GUIDE = read_guide(
    """M3: KV memory in blocks

The KV cache holds 20 tokens, and a request may have up to 16 (max_model_len=16). In regions that
is memory for one request. Here it is five blocks of four tokens, and two requests come: r0 with a
prompt of 6 tokens that wants 5 more, and r1 with 7 that wants 7. Together they grow to 11 and 14
tokens, or 3 and 4 blocks: two more than there are.

When both are done, a third prompt asks for two completions (n=2). At last the first two come
again, to an engine with preemption='swap'.

Watch the block tables: which request gets which block, which one must give its blocks back, and
which blocks are shared.

# the pool
return m3_paged/block_manager.py::BlockManager.__init__
All KV memory is cut into blocks, and a list says which are free. Nobody's memory is set aside: a
block belongs to the request that asks first. The manager counts blocks and knows no tensors.
p (pool.num_blocks, block_size) == (5, 4)  # blocks, and tokens in each
p list(pool.free_blocks) == [0, 1, 2, 3, 4]  # all are free
Try `u` (the scheduler, which builds it), `l`.

# the same loop over another scheduler
call milestone_llm/core/engine_core.py::StepLoop._step
The step loop is the one of M1 and M2: plan, launch, settle. M3 brings a scheduler that counts
blocks, and a runner that moves blocks as the plan says before the model runs.
p type(self.scheduler).__module__ == 'm3_paged.scheduler'  # who plans
p type(self.runner).__module__ == 'm3_paged.runner'  # who launches
p [r.request_id for r in self.scheduler.waiting] == ['r0', 'r1']  # the queue
Try `ll` (the loop), `u` (one thread at a time), `u`.

# a block is allocated
return m3_paged/block_manager.py::BlockManager.allocate
r0 is admitted, and gets room for the 6 tokens that are known of it, not for the 16 that it might
have. Its block table lists the blocks in the order of its tokens. A reference count says how many
tables hold a block.
p num_tokens == 6  # tokens to find room for
p self.block_tables == {'r0': [0, 1]}  # block tables
p self.pool.ref_counts == [1, 1, 0, 0, 0]  # tables that hold blocks 0 to 4
Try `u`, then `p self.kv.describe(16)` (what a region would have taken).

# two requests in the memory of one region
return m3_paged/scheduler.py::Scheduler.schedule
r1 is admitted as well: its 7 tokens take two blocks, and one is still free. That both could not
grow to their full length is no reason to let one wait now.
p [(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]
  == [('r0', 'prefill', 0, 6), ('r1', 'prefill', 0, 7)]  # rows of the step
p self.kv.block_tables == {'r0': [0, 1], 'r1': [2, 3]}  # block tables
p self.kv.pool.num_free == 1  # free blocks
Try `pp __return__.rows[1]`, `p self.kv_usage()`.

# from tokens to slots
return m3_paged/attention.py::AttentionMetadata.build
A token at position p lies in block table[p // 4], at offset p % 4. Block times four plus offset is
its slot, a line of the KV tensors. The last blocks of r0 and r1 are not full, which wastes slots 6,
7 and 15, and no more.
p [row.blocks for row in rows] == [[0, 1], [2, 3]]  # block tables of the rows
p __return__.slot_mapping.tolist()
  == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 14]  # slots of the 13 tokens
Try `p cache.block_size`, `u` (launch(), which hands this to the model).

# keys and values are stored
call m3_paged/block_cache.py::BlockCache.write
Each layer has its keys and values in blocks, and stores the new tokens' at their slots. The table
is the same for all layers.
p tuple(self.keys[layer].shape) == (5, 4, 2, 16)  # [blocks, tokens of a block, KV heads, head size]
p tuple(key.shape) == (13, 2, 16)  # [new tokens, KV heads, head size]
Try `p slot_mapping`, `u` (the attention function, called once a layer).

# a table grows
return m3_paged/block_manager.py::BlockManager.append, when request_id == 'r1' and end == 9
Two steps later r1 has 9 tokens, and the ninth does not fit into two blocks. So its table grows by
one, the last that is free. It lies wherever there was room; here it happens to be next to the
others.
p (request_id, start, end) == ('r1', 8, 9)  # tokens to be written
p self.block_tables == {'r0': [0, 1], 'r1': [2, 3, 4]}  # block tables
p self.pool.num_free == 0  # free blocks
Try `p self.events`, `u` (_make_room(), called for each running request).

# attention reads through the tables
return m3_paged/block_cache.py::BlockCache.gather, when block_tables.shape == (2, 3)
Attention wants each request's keys in one piece. Plain torch cannot follow a table, so the blocks
are copied side by side first; the shorter table is filled up with its own first block. M5's kernel
will read them where they lie.
p block_tables.tolist() == [[2, 3, 4], [0, 1, 0]]  # of r1 and r0
p tuple(__return__[0].shape) == (2, 2, 12, 16)  # [rows, KV heads, positions, head size]
Try `u`, then `p group.context_lens`.

# what lies beyond the last token is hidden
return m3_paged/attention.py::DecodeGroup.mask
A mask is added to the attention scores: 0 where a row may look, minus infinity at positions that
hold nothing yet or came from the block that filled up the table.
p (__return__ == 0).sum(-1).flatten().tolist() == [9, 8]  # positions that r1 and r0 see
Try `p __return__[1].flatten()`.

# no block is left
return m3_paged/block_manager.py::BlockManager.can_append, when request_id == 'r0' and end == 9
Now r0 has 9 tokens and needs a third block. None is free.
p (request_id, start, end) == ('r0', 8, 9)  # tokens to be written
p self.num_blocks_for(end) == 3  # blocks needed for 9 tokens
p self.block_tables[request_id] == [0, 1]  # blocks there are
p self.pool.num_free == 0  # free blocks
p __return__ == False  # whether it can go on
Try `u`, then `p self.by_seniority()[-1].request_id` (who will have to go).

# a preemption, and its reason
call m3_paged/preemption.py::Preempter.preempt
A request must give its blocks back: the one that was admitted last. r1 has 9 tokens in the cache,
two of its output among them. A request that came first is never stopped for one that came later, so
the first always gets on.
p victim.request_id == 'r1'  # who has to go
p reason == 'no free block for r0'  # why
p self.host.pool.num_blocks == 0  # host memory to swap to: none, so its KV will be dropped
p (victim.num_computed_tokens, victim.num_tokens) == (9, 10)  # computed, known
Try `w`, `p victim.output_token_ids`.

# the victim keeps its tokens, not its KV
return m3_paged/preemption.py::Preempter.preempt
All blocks of r1 are free again. What it has generated so far it keeps: no token is ever taken back.
What is computed starts at 0 again: later, prompt and output are computed as one row.
p (victim.num_computed_tokens, victim.num_tokens) == (0, 10)  # computed, known
p victim.status.value == 'waiting'  # its status
p list(self.kv.pool.free_blocks) == [4, 3, 2]  # free blocks
Try `p self.num_preemptions`, `u` (_make_room(), which puts it at the head of the queue).

# r0 has its block
return m3_paged/scheduler.py::Scheduler._make_room
The loop in here preempts until the block is there, or until the request that asked is itself the
victim. r0 gets the block that has been free the longest.
p request.request_id == 'r0'  # who asked
p self.kv.block_tables == {'r0': [0, 1, 4]}  # block tables
p [r.request_id for r in self.waiting] == ['r1']  # the queue
p __return__ == True  # whether r0 runs in this step
Try `ll`.

# the step goes on without it
return m3_paged/scheduler.py::Scheduler.schedule
r0 has its block and runs. Though two blocks are free, no request is admitted in a step that
preempted:
memory is short, and a newcomer would be the next to go.
p [(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]
  == [('r0', 'decode', 8, 1)]  # rows of the step
p len(__return__.preempted) == 1  # preempted in this step
p self.kv.pool.num_free == 2  # free blocks
Try `pp __return__.preempted`.

# r1 has to wait
return m3_paged/scheduler.py::Scheduler.reason_to_wait
In the next step r1 is asked again. It would need blocks for all that is known of it, prompt and
output.
p __return__ == 'no KV memory: blocks needed 3, free 2'  # why it cannot run yet
Try `p budget` (tokens that the step has left).

# r0 is done and leaves its blocks
return m3_paged/scheduler.py::Scheduler.free_memory
A block whose last reference goes is free at once, and can be anybody's in the next step.
p (request.request_id, request.finish_reason) == ('r0', 'length')  # who is done, and why
p self.kv.pool.num_free == 5  # free blocks
Try `p list(self.kv.pool.free_blocks)`.

# r1 is resumed
return m3_paged/scheduler.py::Scheduler._admit, when plan.resumed
r1 gets other blocks than before, in another order. That makes no difference: the table says where
they are.
Its ten tokens are computed in one row, as if all were a prompt. Nine of them had been computed
before: that is what a preemption costs.
p [r.request_id for r in plan.resumed] == ['r1']  # resumed in this step
p plan.rows[-1].phase == 'prefill'  # how the row is labelled
p (plan.rows[-1].start, plan.rows[-1].num_new_tokens) == (0, 10)  # from where, how many
p plan.rows[-1].blocks == [3, 2, 4]  # its block table
Try `p request.token_ids`.

# nobody lost a token
return milestone_llm/frontend/engine.py::BaseEngine.generate
Both have all they wanted. The tokens of r1 are those that it would have got alone, because the same
tokens give the same KV, and a sampled token depends on its seed and position only.
p [len(output.token_ids) for output in __return__] == [5, 7]  # tokens each
p [output.metrics.num_preemptions for output in __return__]
  == [0, 1]  # how often each was preempted
p self.stats()['kv']['watermark'] == 5  # most blocks ever used
Try `pp self.stats()`, `pp self.tracer.records[3].to_dict()`.

# one prompt, two completions
return m3_paged/block_manager.py::BlockManager.fork
The step that is being planned computes the prompt of r2, once. So r2/1 forks from it here: it gets
a copy of the table, not of the blocks, and the reference counts rise to two. Both will get a token
of their own from the same logits.
p self.block_tables == {'r2': [0, 1], 'r2/1': [0, 1]}  # block tables
p self.pool.ref_counts == [2, 2, 0, 0, 0]  # tables that hold blocks 0 to 4
p self.pool.num_used == 2  # blocks in use
Try `u` (_add_row()), then `p [r.request_id for r in row.sampling_requests]`.

# a sharer wants to write
return m3_paged/block_manager.py::BlockManager.append, when request_id == 'r2'
The sixth token filled half of the second block, and each completion's own next token belongs behind
it. r2 comes first. Since the block is shared, it takes a new one and leaves the old one to r2/1:
copy-on-write. The first block is full, is never written again, and stays shared.
p (request_id, start, end) == ('r2', 6, 7)  # tokens to be written
p __return__ == [(1, 4)]  # copies to make: (from, to)
p self.block_tables == {'r2': [0, 4], 'r2/1': [0, 1]}  # block tables
p self.pool.ref_counts == [2, 1, 0, 0, 1]  # tables that hold blocks 0 to 4
Try `p self.num_copies`.

# the other one writes in place
return m3_paged/block_manager.py::BlockManager.append, when request_id == 'r2/1'
When r2/1 comes to write, the block is its own: one copy was enough for two completions.
p (request_id, start, end) == ('r2/1', 6, 7)  # tokens to be written
p __return__ == []  # copies to make
Try `p self.block_tables`.

# the copy is made before the forward
return m3_paged/block_cache.py::BlockCache.move_blocks, when plan.copies
The scheduler only noted the copy in its plan. The runner makes it, in all layers, before the model
runs.
p plan.copies == [(1, 4)]  # (from, to)
p [torch.equal(self.keys[0][old], self.keys[0][new]) for old, new in plan.copies]
  == [True]  # the same keys in both
Try `u` (launch(), where blocks are moved first).

# what sharing saved
return milestone_llm/frontend/engine.py::BaseEngine.generate
Two completions of their own, from one computation of the prompt. All blocks are back.
p [len(c.token_ids) for c in __return__[0].outputs] == [3, 3]  # tokens each
p len({tuple(c.token_ids) for c in __return__[0].outputs}) == 2  # different completions
p self.stats()['copied_blocks'] == 1  # blocks copied
p self.stats()['kv']['free'] == 5  # free blocks
Try `pp self.stats()`, `pp self.tracer.records[-2].to_dict()`.

# the same preemption, with host memory
return m3_paged/preemption.py::Preempter.preempt, when self.host.pool.num_blocks
Another engine, the same two requests, and preemption='swap': r1 has to go in the same step. But its
KV is copied to blocks in host memory, so it need not be computed again.
p victim.status.value == 'swapped'  # its status
p (victim.num_computed_tokens, victim.num_tokens) == (9, 10)  # computed, known
p plan.swap_outs == [(2, 0), (3, 1), (4, 2)]  # copies to make: (device block, host block)
p self.host.block_tables == {'r1': [0, 1, 2]}  # block tables in host memory
Try `p list(self.kv.pool.free_blocks)` (those of r1 are still free).

# one token to compute, not ten
return m3_paged/scheduler.py::Scheduler._admit, when plan.resumed
r0 is done, and r1 gets three blocks, whichever are free. Its KV comes back into them, so its row
has one token, where recompute had ten. Copies to the host and back are the price.
p plan.swap_ins == [(0, 3), (1, 2), (2, 4)]  # copies to make: (host block, device block)
p (plan.rows[-1].start, plan.rows[-1].num_new_tokens) == (9, 1)  # from where, how many
p self.preempter.host.block_tables == {}  # block tables in host memory
Try `p request.status`, `pp plan.rows[-1]`.

# the same tokens either way
return milestone_llm/frontend/engine.py::BaseEngine.generate
Recompute and swap differ in what a preemption costs, and in nothing that a user could see. Swap
computed nine tokens less.
p [len(output.token_ids) for output in __return__] == [5, 7]  # tokens each
p [output.metrics.num_preemptions for output in __return__]
  == [0, 1]  # how often each was preempted
p [self.stats()['prefill_tokens'], self.stats()['decode_tokens']]
  == [13, 10]  # tokens computed: prompts, and one at a time
Try `pp self.stats()`.
"""
)


def scenario() -> None:
    """Two requests that do not fit together, two completions, and the first two with swap."""
    engine = _engine()
    prompts = [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26, 27]]
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for num_tokens in (5, 7)
    ]
    engine.generate(prompts, params)
    two = SamplingParams(temperature=1, seed=1, max_tokens=3, ignore_eos=True, n=2)
    engine.generate([31, 32, 33, 34, 35, 36], two)
    _engine(preemption="swap").generate(prompts, params)


def _engine(preemption: str = "recompute") -> m3_paged.LLMEngine:
    return m3_paged.LLMEngine(
        "tiny-llama",
        max_model_len=16,
        block_size=4,
        kv_cache_tokens=20,
        preemption=preemption,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
