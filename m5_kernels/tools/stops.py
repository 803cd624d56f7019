"""M5's guide: steps that are launched before the tokens of the one before are known."""

from __future__ import annotations

from typing import Any

import m4_prefix_chunked
import m5_kernels
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.walkthrough.guide import read_guide

GUIDE = read_guide(
    """M5: a pipelined step

r0 has a prompt of 3 tokens and wants 4 more. r1 has 5 and would take 8, but the second token that
it will say is a stop token. (It is found out beforehand with M4; M5 is not told.)

On a GPU, Python needs up to a millisecond to plan a step and to take in its tokens. If the GPU
waited for that, it would be idle for a good part of each step. So step n+1 is planned and
launched while step n runs, though its tokens are not known yet.

Watch num_in_flight, which counts tokens on their way, and what happens to r1's last row.

# nothing under way
call milestone_llm/core/engine_core.py::StepLoop._step, when self.milestone == 'm5_kernels'
The loop is M1's: plan, launch, settle. But one launched step may be left to settle here, so the
next one is planned and launched before its tokens are there. The schedule is M4's; the model is a
fused decoder that took over the Hugging Face model's weights.
p self.num_steps_ahead() == 1  # launched steps that may be left to settle
p len(self.in_flight) == 0  # steps that were launched and not settled
p type(self.scheduler).__module__ == 'm4_prefix_chunked.scheduler'  # who plans
p type(self.runner).__name__ == 'FusedRunner'  # who launches
Try `ll` (the loop), `p self.runner.decoder.config`.

# state lives on the device
return m5_kernels/runner.py::FusedRunner._send
Each running request has a row of tensors on the device: tokens, length, block table, sampling
parameters. The host sends what changed since the last step, in one transfer. At first that is all
of it.
p {name: index for name, (index, _) in self.rows.items()} == {'r0': 0, 'r1': 1}  # row of each
p step == [(0, 3, 1), (1, 5, 1)]  # row, new tokens, whether it samples
p [state.rows.token_ids[row, :n].tolist() for row, n, _ in step]
  == [[11, 12, 13], [21, 22, 23, 24, 25]]  # the device's copy of the tokens
p state.rows.num_computed_tokens.tolist() == [0, 0]  # computed so far, by row
Try `p state.rows.block_table`, `u` (launch()).

# where several GPUs would add up
call m5_kernels/decoder/decoder.py::FusedDecoder._add_norm, when box == 0
The product with the output matrix is there. With one GPU it is the whole sum. With several, each
has the part of its own heads, and here the parts are added up: the first all-reduce of the layer.
p self.shard.size == 1  # GPUs that the layer is cut over
p (self.config.num_q_heads, self.config.num_kv_heads) == (4, 2)  # heads that this one has
p type(self.shard)(1, 2).even(self.config.num_q_heads) == slice(2, 4)  # those of rank 1 of 2
p type(self.shard)(1, 2).cut(self.config).num_kv_heads == 1  # of which it would keep the KV
Try `ll`, `p residual.shape`.

# the step is launched
return milestone_llm/core/engine_core.py::StepLoop._launch
On a GPU the kernels are queued by now, and the host has not waited: the runner gave back a promise
of tokens. So that the next step can be planned, this one counts as computed, and each request
counts a token in flight. The plan needs to know how many tokens there are, never which.
p len(self.in_flight) == 1  # steps that were launched and not settled
p [(r.num_computed_tokens, r.num_tokens) for r in self.scheduler.running]
  == [(3, 4), (5, 6)]  # computed tokens, and all: those in flight are counted
p [(len(r.token_ids), r.num_in_flight) for r in self.scheduler.running]
  == [(3, 1), (5, 1)]  # tokens that the host knows, tokens in flight
Try `p step.launched`, `ll`.

# the first call gives nothing
return milestone_llm/frontend/engine.py::BaseEngine.step
Outputs come one call late. That is the price: a call of latency, of which a caller notices nothing,
since the device was never idle.
p __return__ == []  # outputs
p len(self._loop.in_flight) == 1  # steps under way
Try `p self._loop.in_flight[0].plan`.

# the second step feeds tokens that the host has never seen
return m5_kernels/runner.py::FusedRunner._send, when hits == 2
Each row is to compute one token. The host does not have it yet; the device does, because the last
kernel of a step appends the sampled tokens to the rows. Hardly anything is sent: the rows of the
step, and a block where one was added.
p [len(row.request.token_ids) - row.start for row in rows] == [0, 0]  # of it, what the host knows
p [bool(state.rows.token_ids[i, row.start]) for (i, _, _), row in zip(step, rows)]
  == [True, True]  # does the device have it? Before, there were zeros
p state.rows.num_computed_tokens.tolist() == [3, 5]  # computed so far, by row
p step == [(0, 1, 1), (1, 1, 1)]  # row, new tokens, whether it samples
Try `p state.rows.token_ids[:, :8]`, `u`.

# the host gets the tokens of the first step
return m5_kernels/runner.py::FusedRunner.collect
Only now does the host wait for the tokens of step 0, while the device has step 1 to do. They are
those that the device has gone on with.
p list(__return__) == ['r0', 'r1']  # who got a token
p [t.token_id for t in __return__.values()] == self.state.rows.token_ids[[0, 1], [3, 5]].tolist()
  == True  # are they token 3 of r0 and token 5 of r1 on the device?
Try `pp __return__`, `u` (_settle()).

# the first step is settled
return milestone_llm/core/scheduler.py::BaseScheduler.update
The requests take their tokens in. Text, stop tokens and lengths are looked at as ever, one step
late. The tokens of step 1 are still in flight.
p [(len(r.token_ids), r.num_in_flight) for r in self.running]
  == [(4, 1), (6, 1)]  # tokens that the host knows, tokens in flight: those of step 1
p [len(output.token_ids) for output in __return__] == [1, 1]  # outputs so far
Try `p sampled`, `ll`.

# r1 turns out to have stopped
return milestone_llm/core/scheduler.py::BaseScheduler.update
The third call has launched step 2, and now the tokens of step 1 are in: that of r1 is its stop
token. It is finished as of step 1, and gets not one token more. But step 2 is under way, and r1 has
a row in it.
p [(o.request_id, o.finish_reason) for o in __return__]
  == [('r0', None), ('r1', 'stop')]  # why they ended
p [r.request_id for r in self.running] == ['r0']  # who is left
p list(self.kv.block_tables) == ['r0']  # who has blocks
Try `u` (_settle()), then `p [row.request.request_id for row in self.in_flight[0].plan.rows]`.

# its row and its blocks can be used at once
return m5_kernels/runner.py::FusedRunner._release_rows
Somebody else may get them in the very next step, while the wasted row still writes its keys there.
That is safe without any waiting: steps run one after another on the device, and a new owner of a
block writes a slot before reading it.
p {name: index for name, (index, _) in self.rows.items()} == {'r0': 0}  # row of each request
p self.free_rows == [1]  # rows for newcomers
Try `w`.

# what the wasted row computed is dropped
return milestone_llm/core/scheduler.py::BaseScheduler.update, when plan.num_padding_tokens
Step 2 is settled. A token came back for r1 too, but r1 is finished. Its row was computed in vain,
so from now on the plan calls it padding.
p sorted(sampled) == ['r0', 'r1']  # who got a token from the device
p [(row.request.request_id, row.phase) for row in plan.rows]
  == [('r0', 'decode'), ('r1', 'padding')]  # rows of the step
p [output.request_id for output in __return__] == ['r0']  # who takes one in
Try `p plan.rows[1].request.output_token_ids`.

# no row for a length that is known
return milestone_llm/core/request.py::Request.num_uncomputed_tokens,
  when self.num_tokens == self.max_num_tokens
r0 has three tokens and one in flight, and wanted four. That can be known without the token, so it
gets no row too many. Only an end that depends on what a token is - EOS, a stop token, a stop string
- wastes a row.
p (self.num_output_tokens, self.num_in_flight) == (3, 1)  # outputs, and tokens in flight
p self.num_tokens - self.num_computed_tokens == 1  # tokens whose KV is missing
p __return__ == 0  # tokens that a step can compute now
Try `ll`.

# nothing to launch, one step to settle
return milestone_llm/core/engine_core.py::StepLoop._launch
The plan is empty, so no step is launched. The last one is settled at once, since none is ahead of
it.
p plan.rows == []  # rows of the plan
p __return__ == False  # whether a step was launched
p len(self.in_flight) == 1  # steps to settle
Try `u` (_step()), `ll`.

# the bill
return milestone_llm/frontend/engine.py::BaseEngine.stats
Four steps and one wasted row, which the trace calls padding. On a GPU such a row costs what any row
costs in a step that would have been run anyway; waiting for the host in every step would cost far
more.
p __return__['steps'] == 4  # steps
p __return__['padding_tokens'] == 1  # rows computed for nobody
p [[f'{row.request_id} {row.phase}' for row in record.batch] for record in self.tracer.records]
  == [['r0 prefill', 'r1 prefill'], ['r0 decode', 'r1 decode'], ['r0 decode', 'r1 padding'],
    ['r0 decode']]
  # rows of every step
p __return__['kv']['used'] == 0  # blocks in use
Try `pp self.tracer.records[2].to_dict()`.
"""
)


PROMPTS = [[11, 12, 13], [21, 22, 23, 24, 25]]


def scenario() -> None:
    """Two requests, of which the second stops at its second token."""
    from milestone_llm.models.tiny_models import build_tiny_model  # which imports torch

    model = build_tiny_model("llama")
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32, "block_size": 4}
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    oracle = m4_prefix_chunked.LLMEngine(model, **limits)
    told = oracle.generate(PROMPTS[1], SamplingParams(max_tokens=2, **params))[0].token_ids
    engine = m5_kernels.LLMEngine(model, trace="memory", **limits)
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=4, **params))
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=8, stop_token_ids=[told[1]], **params))
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()
