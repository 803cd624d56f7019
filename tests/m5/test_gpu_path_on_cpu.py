"""M5's host code on its GPU path, without a GPU: graphs, streams, events, pinned memory.

`cuda_on_cpu` stands in for the device. It runs under Triton's interpreter, so in the process that
`test_interpreted_kernels.py` starts, or with TRITON_INTERPRET=1 by itself.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import m4_prefix_chunked
import m5_kernels
from engine_helpers import tiny_model
from m5_kernels import device_state, to_host
from m5_kernels.device_state import DeviceState
from m5_kernels.kernels.backend import INTERPRETED
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.sampler import Needs
from milestone_llm.models.tiny_models import build_tiny_model

if torch.cuda.is_available() or not INTERPRETED:
    pytest.skip("for a machine without a GPU, under the interpreter", allow_module_level=True)

from cuda_on_cpu import Machine, MisuseError, cuda_on_cpu

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [40, 41, 42], [9, 8, 7, 6, 5], [70, 71]]
LIMITS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_model_len": 32,
    "block_size": 4,
    "kv_cache_tokens": 64,
    "max_num_batched_tokens": 64,  # the least for which there is a graph with chunks
    "long_prefill_token_threshold": 5,
}


def params() -> list[m5_kernels.SamplingParams]:
    """Two greedy, one drawn, one that stops early."""
    kind = m5_kernels.SamplingParams
    return [
        kind(temperature=0, max_tokens=6),
        kind(temperature=0.8, seed=3, max_tokens=5),
        kind(temperature=0, max_tokens=6, stop_token_ids=list(range(0, 198, 2))),
        kind(temperature=0, max_tokens=4, repetition_penalty=1.3, logprobs=1),
    ]


def model_on(device: str) -> Any:
    return copy.deepcopy(tiny_model(num_hidden_layers=1)).float().to(device)


def tokens_of(engine: Any) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, params())]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """M4's, one request at a time, on the CPU."""
    engine = m4_prefix_chunked.LLMEngine(model_on("cpu"), **{**LIMITS, "max_num_seqs": 1})
    return tokens_of(engine)


def engine_on(machine: Machine, **fields: Any) -> Any:
    return m5_kernels.LLMEngine(model_on("cuda:0"), **LIMITS, **fields)


def test_graphs_and_pipelined_steps_give_the_tokens_of_m4(expected):
    with cuda_on_cpu() as machine:
        engine = engine_on(machine, check_invariants=True)
        machine.launches.clear()
        assert tokens_of(engine) == expected
        assert machine.num_replays > 5
        # Whatever was launched had been compiled before.
        kernels = {name for name, number in machine.launches.items() if number and name[0] == "_"}
        assert {"_flash_decode_kernel", "_paged_prefill_kernel", "_expand_step_kernel"} <= kernels
        assert kernels <= set(machine.compiled)


def test_so_do_steps_that_are_launched_kernel_by_kernel(expected):
    with cuda_on_cpu() as machine:
        engine = engine_on(machine, enforce_eager=True)
        assert tokens_of(engine) == expected
        assert machine.num_replays == 0


def test_so_do_steps_with_guesses():
    model = build_tiny_model("llama", vocab_size=40, num_hidden_layers=1).float()
    model.model.layers[0].self_attn.o_proj.weight.data *= 0.003  # so that texts run in circles
    prompts = [[7, 8] * 3, [9] * 4]
    greedy = m5_kernels.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    limits = {**LIMITS, "speculation": "ngram", "num_speculative_tokens": 2}
    engine = m4_prefix_chunked.LLMEngine(copy.deepcopy(model), **LIMITS)
    expected = [output.token_ids for output in engine.generate(prompts, greedy)]
    with cuda_on_cpu() as machine:
        engine = m5_kernels.LLMEngine(model.to("cuda:0"), **limits)
        assert [output.token_ids for output in engine.generate(prompts, greedy)] == expected
        assert engine.stats()["spec_decode_num_draft_tokens"] > 0
        assert engine.runner.graphs is not None
        assert machine.num_replays > 5


def test_after_a_failure_the_device_is_as_new(expected):
    with cuda_on_cpu() as machine:
        engine = engine_on(machine)
        engine.add_request(PROMPTS[0], params()[0])
        engine.step()
        launch, engine.runner.launch = engine.runner.launch, lambda plan: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.step()
        engine.runner.launch = launch
        output = engine.generate(PROMPTS[1], params()[1])[0]
        assert output.token_ids == expected[1]
        assert machine.num_replays


def test_launches_of_a_decode_step():
    """What a graph of one row holds, by kernel: nine a layer, and those of the step around it."""
    with cuda_on_cpu() as machine:
        engine = engine_on(machine)
        engine.capture_graphs()
        machine.launches.clear()
        bucket = engine.runner.buckets.bucket_for(engine.runner.buckets.all()[-1])
        engine.runner.graphs.replay(bucket, Needs())
        assert {name: number for name, number in machine.launches.items() if number} == {
            "_expand_step_kernel": 1,
            "_rms_norm_kernel": 3,
            "_skinny_linear_kernel": 5,
            "_rope_kv_write_kernel": 1,
            "_flash_decode_kernel": 1,
            "_score_chunk_kernel": 1,
            "_pick_best_kernel": 1,
            "_append_sampled_kernel": 1,
        }


# --- mistakes that a GPU would not tell of ------------------------------------------------------


def test_tokens_that_are_read_before_they_are_there_are_seen(monkeypatch):
    with cuda_on_cpu() as machine:
        engine = engine_on(machine)
        event = type(torch.cuda.Event())
        monkeypatch.setattr(event, "synchronize", lambda self: None)
        with pytest.raises(MisuseError, match="nobody waited"):
            tokens_of(engine)
        monkeypatch.undo()


def test_host_memory_whose_turn_comes_too_soon_is_seen(monkeypatch):
    monkeypatch.setattr(to_host, "NUM_TURNS", 1)
    with cuda_on_cpu() as machine:
        engine = engine_on(machine)
        with pytest.raises(MisuseError, match="nobody waited"):
            tokens_of(engine)


def test_pinned_memory_that_is_written_while_it_is_copied_is_seen(monkeypatch):
    def flush(self: DeviceState) -> None:
        if not hasattr(self, "pinned"):
            self.pinned = torch.zeros(2, 4096, dtype=torch.int64, pin_memory=True)
        places = [place for each in self._places for place in each]
        values = [value for each in self._values for value in each]
        self._places, self._values = [], []
        self.pinned[0, : len(places)] = torch.tensor(places)
        self.pinned[1, : len(places)] = torch.tensor(values)
        pairs = self.pinned[:, : len(places)].to(self._arena.device, non_blocking=True)
        self._arena[pairs[0]] = pairs[1].int()

    monkeypatch.setattr(device_state.DeviceState, "flush", flush)
    with cuda_on_cpu() as machine:
        engine = engine_on(machine)
        with pytest.raises(MisuseError, match="written while a copy from it is under way"):
            tokens_of(engine)


def test_a_graph_whose_memory_is_gone_is_seen():
    with cuda_on_cpu() as machine:
        engine = engine_on(machine)
        engine.capture_graphs()
        step = engine.runner.device_step
        step.metadata = StepMetadata.allocate(
            step.max_tokens, step.state.num_seqs, step.state.max_blocks, torch.device("cuda:0")
        )
        with pytest.raises(MisuseError, match="memory was given back"):
            tokens_of(engine)
