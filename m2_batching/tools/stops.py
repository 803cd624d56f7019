"""M2's guide: what `schedule` decides, and what the model gets to see of it."""

from __future__ import annotations

import m2_batching
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.walkthrough.guide import read_guide

GUIDE = read_guide(
    """M2: requests are chosen at every step

The three requests of M1's walkthrough come again, to an engine with two rows (max_num_seqs=2):
prompts of 3, 5 and 4 tokens, outputs of 2, 5 and 2. There they took seven steps and 23 positions,
five of them padding. A step computes at most nine tokens here (max_num_batched_tokens=9).

After the third step two more arrive: r3 with a prompt of nine tokens, and r4 with one of two.

Watch what each request is told when it asks to join a step, and which region of KV memory it gets.

# the loop is M1's
call milestone_llm/core/engine_core.py::StepLoop._step
Plan, launch, settle: M1 runs the very same loop. What differs is whom it asks: m2_batching.engine
builds another scheduler and another runner.
p type(self.scheduler).__module__ == 'm2_batching.scheduler'  # who decides
p type(self.runner).__module__ == 'm2_batching.runner'  # who computes
p [r.request_id for r in self.scheduler.waiting]
  == ['r0', 'r1', 'r2']  # the queue, first come first served
Try `w` (who called us), `ll` (the whole step).

# may r0 join?
return m2_batching/scheduler.py::Scheduler.reason_to_wait
The head of the queue is asked for a reason to wait, and each limit is looked at in turn: rows
(max_num_seqs), tokens of this step (the budget), KV memory (a free region). None means that there
is no such reason.
p request.request_id == 'r0'  # who asks
p (len(self.running), self.config.max_num_seqs) == (0, 2)  # rows taken, rows there
p (request.num_uncomputed_tokens, budget) == (3, 9)  # tokens it needs, tokens left
p self.kv.free_regions == [0, 1]  # KV regions that nobody owns
p __return__ == None  # the reason to wait
Try `ll` (the three tests), `u` (schedule(), which asks on until there is a reason).

# r0 gets a region and a row
return m2_batching/scheduler.py::Scheduler._admit
To be admitted is to own a region: room for max_model_len tokens, though r0 will store only four.
The row says what the step computes: from token 0 on, three of them.
p self.kv.regions == {'r0': 0}  # region of each request
p self.max_model_len == 64  # tokens reserved by a region
p (plan.rows[-1].start, plan.rows[-1].num_new_tokens, plan.rows[-1].blocks)
  == (0, 3, [0])  # first token, number of tokens, region
Try `pp plan.rows[-1]`, `p self.running`.

# r2 is told why it waits
return m2_batching/scheduler.py::Scheduler.reason_to_wait, when request.request_id == 'r2'
r0 and r1 are in, and there is no third row. The other limits would say no as well: one token of the
budget is left, and no region. There are as many regions as rows, so the test for memory never
decides in M2; it does in M3, where memory is counted in blocks.
p __return__ == 'no row is left: max_num_seqs=2'  # the reason to wait
p budget == 1  # tokens left: 9 - 3 - 5
p self.kv.free_regions == []  # KV regions that nobody owns
Try `p request`, `u`.

# the first plan
return m2_batching/scheduler.py::Scheduler.schedule
Two rows of different length, and no padding: nothing makes a rectangle of them. This step is the
same as M1's first, except that eight positions are computed and not ten.
p [(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]
  == [('r0', 'prefill', 0, 3), ('r1', 'prefill', 0, 5)]  # id, phase, start, tokens
p __return__.num_padding_tokens == 0  # positions computed for nobody
Try `pp __return__.rows[0]`.

# one flat batch
return m2_batching/attention.py::AttentionMetadata.build
Both prompts go through the model as one sequence of eight tokens. Linear layers, norms and the MLP
do not care: they look at one token at a time. Only attention must know whose token is whose, and
this is what it is told.
p __return__.token_regions.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]  # whose region
p __return__.token_positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]  # where in it
p __return__.prefill_spans == [(0, 3), (3, 8)]  # which tokens attend to each other
p __return__.decode_regions.tolist() == []  # regions that decode
Try `u` (launch(), which hands this to the model), `ll`.

# inside layer 0
call m2_batching/attention.py::region_attention
Hugging Face's own decoder layer calls this in place of its attention. The batch is one row of eight
tokens; there are four query heads and two KV heads, not repeated (GQA). There is no mask: the
metadata, handed through model(...), replaces it.
p tuple(query.shape) == (1, 4, 8, 16)  # [1, heads, tokens, head_dim]
p tuple(key.shape) == (1, 2, 8, 16)  # [1, KV heads, tokens, head_dim]
p attention_mask == None  # what Hugging Face would have masked
p module.layer_idx == 0  # layer
Try `w` (from launch() through transformers to here), `ll`.

# r0 leaves in the step that finishes it
return m2_batching/scheduler.py::Scheduler.free_memory
The second step has decoded both rows, and r0 has its two tokens. It leaves in the same step, and
its region is free. Nothing is erased: the KV of r0 stays there until another request overwrites it.
p (request.request_id, request.finish_reason) == ('r0', 'length')  # who is done, and why
p [r.request_id for r in self.running] == ['r1']  # who goes on
p self.kv.free_regions == [0]  # KV regions that nobody owns
p [r.request_id for r in self.waiting] == ['r2']  # who waits
Try `u`, `u` (update(), which every scheduler has), `p request.output_token_ids`.

# r2 asks again
return m2_batching/scheduler.py::Scheduler.reason_to_wait, when len(self.running) == 1
The third step gives r1 its token first: running requests come before waiting ones. Eight tokens are
left, a row is free and a region, so r2 may join. In M1 this was the step in which the dead row of
r0 was computed for the first time.
p request.request_id == 'r2'  # who asks
p budget == 8  # tokens left: 9 - 1
p __return__ == None  # the reason to wait
Try `p [r.request_id for r in self.running]`.

# the region of r0 is used again
return m2_batching/scheduler.py::Scheduler._admit, when request.request_id == 'r2'
r2 gets the lowest free region, which was r0's one step ago. Low regions first keeps the used ones
close together, so that attention can read them as one slice.
p self.kv.regions == {'r1': 1, 'r2': 0}  # region of each request
p plan.rows[-1].blocks == [0]  # region of the new row
p [(e.type, e.request_id) for e in self.events] == [('alloc', 'r2')]  # for the trace
Try `p self.kv.watermark` (most regions ever used).

# prefill and decode in one step
return m2_batching/scheduler.py::Scheduler.schedule, when hits == 3
r1 computes one token and r2 four. The scheduler makes no difference between the two: each row
computes the known tokens whose KV is not there yet. Prefill and decode are names for what comes of
it.
p [(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]
  == [('r1', 'decode', 6, 1), ('r2', 'prefill', 0, 4)]  # id, phase, start, tokens
p [row.samples for row in __return__.rows] == [True, True]  # which rows sample
p __return__.num_tokens == 5  # tokens of the step
Try `pp __return__.rows`.

# two kinds of rows for attention
return m2_batching/attention.py::AttentionMetadata.build, when hits == 3
Decode rows stand first, so that their tokens are one slice. The prefill row attends to itself; the
decode row looks into its region, where seven tokens will be, its own included.
p __return__.token_regions.tolist() == [1, 0, 0, 0, 0]  # whose region
p __return__.token_positions.tolist() == [6, 0, 1, 2, 3]  # where in it
p __return__.decode_regions.tolist() == [1]  # regions that decode
p __return__.decode_context_lens.tolist() == [7]  # tokens they attend to
p __return__.prefill_spans == [(1, 5)]  # tokens of the prefill row
Try `p __return__.is_dense` (are most of the regions read?), `u`.

# the price of one call for all decode rows
return m2_batching/attention.py::AttentionMetadata.decode_mask,
  when self.prefill_spans and len(self.decode_regions)
All decode rows share one attention call, which reads the regions where they lie, up to the longest
context. So region 0 is read too, and its result thrown away: it sees one position, since a softmax
over none is not a number. That is what M2 gives up.
p tuple(__return__.shape) == (2, 1, 1, 7)  # [regions, 1, 1, longest context]
p __return__[:, 0, 0].int().tolist()
  == [[1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]  # what each region's query may see
Try `p self.decode_regions`, `u` (_decode(), which uses the mask), `ll`.

# both rows have a token
return m2_batching/runner.py::flat_forward, when hits == 3
Only the last token of each row goes through the LM head (logits_to_keep): two of five. One forward
gave r1 its third token and r2 its first.
p len(input_ids) == 5  # tokens computed
p last_tokens == [0, 4]  # those whose logits are wanted
p tuple(output.logits.shape) == (1, 2, 199)  # [1, rows that sample, vocabulary]
p sorted(__return__) == ['r1', 'r2']  # who got a token
Try `pp __return__`, `w` (who called it).

# r3 arrives while others decode
call milestone_llm/core/scheduler.py::BaseScheduler.add, when self.running
Between two steps a request arrives. It is put into the queue and no more: nothing is stopped for
it, and the next call of schedule() will ask whether it may join.
p (request.request_id, request.num_prompt_tokens) == ('r3', 9)  # who comes
p [r.request_id for r in self.running] == ['r1', 'r2']  # who runs
Try `w` (from add_request(), called between two steps, to here).

# r3 needs a whole step for itself
return m2_batching/scheduler.py::Scheduler.reason_to_wait,
  when request.request_id == 'r3' and len(self.running) == 1
The fourth step had no row free. In the fifth there is a row and a region, but r1 takes one of
nine tokens, and a prompt is computed in one piece: it waits for a step in which no other request
runs. m4_prefix_chunked cuts prompts into chunks.
p (len(self.running), self.config.max_num_seqs) == (1, 2)  # rows taken, rows there
p self.kv.free_regions == [0]  # KV regions that nobody owns
p __return__ == 'tokens needed: 9, left in this step: 8'  # the reason to wait
Try `p request.num_uncomputed_tokens, budget`.

# nobody overtakes
return m2_batching/scheduler.py::Scheduler.schedule, when hits == 5
r4 has two tokens and would fit into the fifth step. It waits behind r3 all the same: if small
requests could pass, a stream of them would keep a large one out for ever.
p [(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]
  == [('r1', 'decode', 8, 1)]  # id, phase, start, tokens
p [r.request_id for r in self.waiting] == ['r3', 'r4']  # who waits
Try `ll`, `p self.config.policy`.

# the bill
return milestone_llm/frontend/engine.py::BaseEngine.stats
The requests of M1's walkthrough are done after five steps, not seven, and 18 positions, not 23. r2
has its first token in the third step instead of the sixth. The other two steps are for r3 and r4.
Below, see how little of the reserved KV memory is used.
p [[f'{row.request_id} {row.phase}' for row in record.batch] for record in self.tracer.records[:5]]
  == [['r0 prefill', 'r1 prefill'], ['r0 decode', 'r1 decode'], ['r1 decode', 'r2 prefill'],
    ['r1 decode', 'r2 decode'], ['r1 decode']]
  # rows of the first five steps
p [[f'{row.request_id} {row.phase}' for row in record.batch] for record in self.tracer.records[5:]]
  == [['r3 prefill'], ['r3 decode', 'r4 prefill']]  # rows of the last two
p __return__['padding_tokens'] == 0  # positions computed for nobody
p [(r.kv.stored_tokens, r.kv.reserved_tokens) for r in self.tracer.records]
  == [(8, 128), (6, 64), (11, 128), (8, 64), (0, 0), (9, 64), (0, 0)]
  # KV after each step: stored, reserved
Try `pp __return__`, `pp self.tracer.records[2].to_dict()`.
"""
)


def scenario() -> None:
    """Three requests at the start and two after the third step."""
    engine = m2_batching.LLMEngine(
        "tiny-llama",
        max_num_seqs=2,
        max_num_batched_tokens=9,
        max_model_len=64,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    for prompt, num_tokens in (([11, 12, 13], 2), ([21, 22, 23, 24, 25], 5), ([31, 32, 33, 34], 2)):
        engine.add_request(prompt, _exactly(num_tokens))
    for _ in range(3):
        engine.step()
    engine.add_request([41, 42, 43, 44, 45, 46, 47, 48, 49], _exactly(2))
    engine.add_request([51, 52], _exactly(1))
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
