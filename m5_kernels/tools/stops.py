"""M5's guide: steps that are launched before the tokens of the one before are known."""

from __future__ import annotations

from typing import Any

import m4_prefix_chunked
import m5_kernels
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.walkthrough.guide import read_guide

GUIDE = read_guide(
    """M5: a pipelined step

r0 has a prompt of 3 tokens and wants 4 more. r1 has 5 and would take 8, but the second token that
it will say is a stop token. (It is found out beforehand with M4; M5 is not told.)

On a GPU, Python needs up to a millisecond to plan a step and to take in its tokens. If the GPU
waited for that, it would be idle for a good part of each step. So step n+1 is planned and
launched while step n runs, though its tokens are not known yet.

Watch the -1 that stands for a token on its way, and what becomes of r1's last row.

# nothing under way
call m5_kernels/engine.py::LLMEngine._step
The loop of M1 is schedule, execute, update. Here execute is cut in two, launch and collect, and
between them lies the whole next call. The schedule is M4's; the model is a fused decoder that took
over the Hugging Face model's weights.
p self.is_pipelined == True  # no request needs the host to sample
p self._in_flight == None  # a step that was launched and not collected
p type(self.scheduler).__mro__[1].__module__ == 'm4_prefix_chunked.scheduler'  # whose schedule
p type(self.runner).__name__ == 'FusedRunner'  # who computes
Try `ll` (the two loops), `p self.decoder.config`.

# state lives on the device
return m5_kernels/runner.py::FusedRunner._send
Each running request has a row of tensors on the device: tokens, length, block table, sampling
parameters. The host sends what changed since the last step, in one transfer. At first that is all
of it.
p self.row_of == {'r0': 0, 'r1': 1}  # row of each request
p step == [(0, 3, 1), (1, 5, 1)]  # row, new tokens, whether it samples
p [state.rows.token_ids[row, :n].tolist() for row, n, _ in step]
  == [[11, 12, 13], [21, 22, 23, 24, 25]]  # the device's copy of the tokens
p state.rows.num_computed_tokens.tolist() == [0, 0]  # computed so far, by row
Try `p state.rows.block_table`, `u` (launch()).

# the step is launched
return m5_kernels/engine.py::LLMEngine._launch
On a GPU the kernels are queued by now, and nobody has waited. What comes back is a promise: who
samples, and where the tokens will be. A step of decode rows alone is one CUDA graph, a single
launch.
p __return__.sampling == [True, True]  # which rows sample
p type(__return__.launched).__name__ == 'LaunchedStep'  # the promise
Try `p __return__.launched.requests`.

# the step is expected
return m5_kernels/scheduler.py::Scheduler.expect
So that the next step can be planned, this one counts as computed, and every row that samples gets a
placeholder, -1, for the token that will come. The plan needs to know how many tokens there are,
never which.
p [(r.num_computed_tokens, r.num_tokens) for r in self.running]
  == [(3, 4), (5, 6)]  # computed and known tokens
p [r.token_ids[-1] for r in self.running] == [-1, -1]  # last tokens
Try `ll`.

# the first call gives nothing
return m5_kernels/engine.py::LLMEngine._step
Outputs come one call late. That is the price: a call of latency, of which a caller notices nothing,
since the device was never idle.
p __return__ == []  # outputs
p self._in_flight is None == False  # nothing under way?
Try `p self._in_flight.plan`.

# the second step feeds tokens that the host has never seen
return m5_kernels/runner.py::FusedRunner._send, when hits == 2
Each row is to compute one token. The host has -1 for it; the device has the real one, for the last
kernel of a step appends what was sampled to the row. Hardly anything is sent: the rows of the step,
and a block where one was added.
p [row.request.token_ids[-1] for row in rows] == [-1, -1]  # what the host knows
p [int(state.rows.token_ids[i, row.start]) >= 0 for i, row in enumerate(rows)]
  == [True, True]  # whether the device has a token there
p state.rows.num_computed_tokens.tolist() == [3, 5]  # computed so far, by row
p step == [(0, 1, 1), (1, 1, 1)]  # row, new tokens, whether it samples
Try `p state.rows.token_ids[:, :8]`, `u`.

# the first step is settled
return m5_kernels/scheduler.py::Scheduler.settle
Only now does the host wait for the tokens of step 0, while the device has step 1 to do.
Placeholders become tokens; text, stop tokens and lengths are looked at as ever.
p [(r.num_computed_tokens, r.num_tokens) for r in self.running]
  == [(3, 4), (5, 6)]  # computed and known tokens
p [r.token_ids[-1] >= 0 for r in self.running] == [True, True]  # real tokens?
p [len(output.token_ids) for output in __return__] == [1, 1]  # outputs so far
Try `p sampled`, `u` (_settle(), which collected them).

# r1 turns out to have stopped
return m5_kernels/scheduler.py::Scheduler.settle, when hits == 2
The third call has launched step 2, and now the tokens of step 1 are in: that of r1 is its stop
token. It is finished as of step 1, and gets not one token more. But step 2 is under way, and r1 has
a row in it.
p [(o.request_id, o.finish_reason) for o in __return__]
  == [('r0', None), ('r1', 'stop')]  # why they ended
p [r.request_id for r in self.running] == ['r0']  # who is left
p self.kv.owners.keys() == {'r0'} == True  # are its blocks given back?
Try `p finished`.

# its row and its blocks go at once
return m5_kernels/runner.py::FusedRunner.forget, when request_id == 'r1'
Somebody else may get them in the very next step, while the wasted row still writes its keys there.
That is safe without any waiting: steps run one after another on the device, and whoever gets a
block writes a slot before reading it.
p self.row_of == {'r0': 0}  # row of each request
p self.free_rows == [1]  # rows for newcomers
Try `w`.

# nothing is expected of it
return m5_kernels/scheduler.py::Scheduler.expect, when hits == 3
Step 2 was launched with both rows. r0 gets a placeholder, r1 is finished and is left alone.
p [(row.request.request_id, row.request.is_finished) for row in plan.rows]
  == [('r0', False), ('r1', True)]  # rows of the step under way
p [r.token_ids[-1] for r in self.running] == [-1]  # last tokens of who runs
Try `p plan.rows[1].request.token_ids`.

# no row for a length that is known
return m5_kernels/scheduler.py::Scheduler.is_decoding, when request.num_output_tokens == 4
r0 has three tokens and a placeholder, and wanted four. That can be known without the token, so it
gets no row too many. Only an end that depends on what a token is - EOS, a stop token, a stop string
- wastes a row.
p request.num_output_tokens == 4  # outputs, the placeholder included
p __return__ == False  # does it get a row?
Try `ll`.

# the bill
return m4_prefix_chunked/engine.py::LLMEngine.stats
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
