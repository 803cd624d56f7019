"""M1's guide: a static batch from `generate` to a finished row that still pads the batch."""

from __future__ import annotations

import m1_single
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.walkthrough.guide import read_guide

GUIDE = read_guide(
    """M1: a static batch, step by step

Three requests come to an engine that computes two at a time (max_num_seqs=2). Their prompts have
3, 5 and 4 tokens, and they want 2, 5 and 2 tokens of output. The model is a tiny llama with
random weights: what it says is noise, how it is served is not.

Watch two numbers: how many positions are computed in vain, and how long r2 waits while the
row of r0 has nothing left to do.

# three prompts come in
call milestone_llm/frontend/engine.py::BaseEngine.generate
This is all a user sees: prompts in, outputs out. generate() makes a Request of each prompt, queues
them, and goes on step by step until all of them are finished.
p [len(prompt) for prompt in prompts] == [3, 5, 4]  # prompt lengths, in tokens
p [p.max_tokens for p in sampling_params] == [2, 5, 2]  # tokens wanted
p self.config.max_num_seqs == 2  # most requests that one step computes
Try `a` (the arguments), `l` (the source around here), `c` (on to the next stop).

# the loop of every milestone
call milestone_llm/core/engine_core.py::StepLoop._step
One step is plan, launch, settle. The scheduler plans what to compute and knows no tensors; the
runner launches it and knows no queues; to settle is to wait for the tokens and hand them to the
requests. Later milestones bring another scheduler and runner, never another loop.
p [r.request_id for r in self.scheduler.waiting]
  == ['r0', 'r1', 'r2']  # the queue, first come first served
p self.scheduler.batch == []  # nothing runs yet
p self.num_steps_ahead() == 0  # steps that may be left to settle: M1 settles each at once
Try `w` (who called us), `ll` (the whole step).

# a batch is formed
return m1_single/scheduler.py::Scheduler._form_batch
Requests join while there is a free row and the padded batch fits in one step. Then the door closes:
no request joins until the last row is done. r2 came at the same time as the others and waits.
p [r.request_id for r in self.batch] == ['r0', 'r1']  # rows of the static batch
p [r.request_id for r in self.waiting] == ['r2']  # left outside
p max(r.num_tokens for r in self.batch) == 5  # the longest prompt: all rows will be this wide
Try `ll` (the loop that filled the batch), `p self.config.max_num_seqs`.

# the plan of the first step
return m1_single/scheduler.py::Scheduler.schedule
A plan says for each row where it starts and how many tokens it computes. The rows start at 0 with
their whole prompt, which people call prefill. A tensor is a rectangle, so the shorter prompt costs
as much as the longer one: the first waste.
p [(row.phase, row.start, row.num_new_tokens) for row in __return__.rows]
  == [('prefill', 0, 3), ('prefill', 0, 5)]  # what the step computes of r0 and r1
p __return__.num_padding_tokens == 2  # positions computed for nobody
p self.batch_width == 5  # columns of the batch, in tokens
Try `pp __return__.rows[0]`.

# prompts padded on the left
return m1_single/runner.py::ModelRunner._start_batch
Padding goes to the left, so that the last token of every prompt is in the last column: its logits
give the next token, and the next column is free for it. The attention mask hides the padding from
the real tokens.
p __return__.tolist() == [[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]]  # input_ids: 0 is padding
p self.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]  # 0 is masked out
Try `u` (launch(), which goes on with them), `ll`.

# the forward pass is done
return m1_single/runner.py::ModelRunner.launch
A token's position counts the real tokens before it, not the columns: 11 is at position 0 though it
stands in column 2. Hugging Face's cache now holds keys and values of all columns, padding included.
Only the last column's logits are needed, one row a request.
p position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]  # positions of the columns
p self.past_key_values.get_seq_length() == 5  # columns in the KV cache
p tuple(logits.shape) == (2, 199)  # [rows that sample, vocabulary]
p sorted(sampled) == ['r0', 'r1']  # who got a token
Try `pp sampled` (the tokens), `p logits.argmax(-1)` (greedy sampling took these).

# the step is on its way
return milestone_llm/core/engine_core.py::StepLoop._launch
The launched step's tokens count as computed: their keys and values are in the cache, or will be.
The tokens that it samples count as in flight: how many there are is known, which they are is not.
Here they wait in the runner for the next line; M5 plans another step first.
p [(r.num_computed_tokens, r.num_in_flight) for r in self.scheduler.running]
  == [(3, 1), (5, 1)]  # computed tokens of r0 and r1, tokens in flight
p len(self.in_flight) == 1  # steps that were launched and not settled
Try `u` (_step(), which settles it), `ll`.

# tokens are handed out
return milestone_llm/core/scheduler.py::BaseScheduler.update
Each request has one more token. The new token's keys and values are not in the cache yet: known
tokens are one ahead of computed ones, and that one is what the next step computes.
p [(r.num_computed_tokens, len(r.token_ids)) for r in self.running]
  == [(3, 4), (5, 6)]  # computed and known tokens of r0 and r1
p [r.num_in_flight for r in self.running] == [0, 0]  # tokens on their way
p [len(output.token_ids) for output in __return__]
  == [1, 1]  # output tokens so far, as the caller gets them
Try `p self.running[0].output_token_ids`, `u` (_settle(), which collected the tokens).

# a decode step feeds one column
return m1_single/runner.py::ModelRunner._extend_batch
The second step computes one token a row: the one just sampled. The cache knows the rest, so a step
reads all weights to compute two positions. The mask grows by a column of ones.
p tuple(__return__.shape) == (2, 1)  # [rows, columns] of input_ids
p __return__[:, 0].tolist() == [row.request.token_ids[-1] for row in plan.rows]
  == True  # each row is fed its own last token
p self.attention_mask.tolist()
  == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]  # the mask is six columns wide now
Try `p __return__`.

# r0 has all its tokens
return milestone_llm/core/scheduler.py::BaseScheduler.update, when hits == 2
r0 wanted two tokens and has them: it is finished, and its output could go to the user. Yet its row
stays in the batch, since a row cannot leave the rectangle. r2 could use it, and waits.
p self.batch[0].finish_reason == 'length'  # why r0 ended
p [r.request_id for r in self.running] == ['r1']  # who still needs tokens
p [r.request_id for r in self.batch] == ['r0', 'r1']  # rows of the static batch
p [r.request_id for r in self.waiting] == ['r2']  # who waits
Try `p self.batch[0].output_token_ids`.

# a finished row pads the batch
return m1_single/scheduler.py::Scheduler.schedule, when hits == 3
The third step plans two rows for one token. The row of r0 is labelled padding: it computes a
position that is never read, and samples nothing. This is the second waste, and it grows with the
difference in output lengths.
p [(row.request.request_id, row.phase) for row in __return__.rows]
  == [('r0', 'padding'), ('r1', 'decode')]  # the rows of the step
p [row.samples for row in __return__.rows] == [False, True]  # which rows sample
p __return__.num_padding_tokens == 1  # positions computed for nobody
Try `w`, `pp __return__.rows[0]`.

# the model computes it all the same
return m1_single/runner.py::ModelRunner.launch, when hits == 3
The model was given both rows; that one of them is dead, it cannot know. Two rows in, one token out:
half of this step's work is lost. r0 is fed its last token, in this step and in all that follow.
p tuple(input_ids.shape) == (2, 1)  # [rows, columns] of input_ids
p self.past_key_values.get_seq_length() == 7  # columns in the cache, for both rows
p sorted(sampled) == ['r1']  # who got a token
Try `p input_ids`, `p plan.rows[0].request.token_ids`.

# the last row is done
return m1_single/scheduler.py::Scheduler.free_memory, when not self.running
r1 has its fifth token. Only now, when no request runs, the whole batch is given back, and r2
may come in: the row of r0 was idle for three steps.
p request.request_id == 'r1'  # who is done
p self.batch == []  # no row is taken
p self.batch_width == 0  # columns of the batch
p [r.request_id for r in self.waiting] == ['r2']  # who waits
Try `p request.output_token_ids`, `u`, `u` (update(), which found r1 finished).

# r2 is admitted at last
return m1_single/scheduler.py::Scheduler._form_batch, when hits == 2
The sixth step forms a new batch, of r2 alone: one row where two would fit. Had r2 taken the row of
r0 in the third step, it would be done by now. That is what m2_batching does.
p [r.request_id for r in self.batch] == ['r2']  # rows of the new batch
p [r.request_id for r in self.waiting] == []  # who waits
Try `u`, `u` (_launch(), in the step loop), then `p self.counts`.

# the bill
return milestone_llm/frontend/engine.py::BaseEngine.generate
Outputs come back in the order of the prompts, whenever they were done. The trace shows where the
work went: 18 of 23 computed positions were somebody's. With outputs of 10 and 100 tokens instead of
2 and 5, the share is far worse.
p [len(output.token_ids) for output in __return__] == [2, 5, 2]  # tokens each
p [' '.join(row.phase for row in record.batch) for record in self.tracer.records]
  == ['prefill prefill', 'decode decode', 'padding decode', 'padding decode', 'padding decode',
    'prefill', 'decode']
  # what the rows of each step were
p self.stats()['padding_tokens'] == 5  # left padding 2, dead rows 3
p round(self.stats()['useful_share'], 2) == 0.78  # share that was somebody's
Try `pp self.stats()`, `pp self.tracer.records[2].to_dict()`.
"""
)


def scenario() -> None:
    """Three requests on an engine that computes two at a time."""
    engine = m1_single.LLMEngine(
        "tiny-llama",
        max_num_seqs=2,
        max_model_len=64,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    prompts = [[11, 12, 13], [21, 22, 23, 24, 25], [31, 32, 33, 34]]
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for num_tokens in (2, 5, 2)
    ]
    engine.generate(prompts, params)
