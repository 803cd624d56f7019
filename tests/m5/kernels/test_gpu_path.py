"""The whole engine on its GPU path, on a device that stands in for a GPU (`cuda_on_cpu`).

Graphs are captured and replayed, steps overlap, copies are under way, kernels are compiled at the
start. Mistakes that the stand-in must see are planted in `mutants.txt`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import m4_prefix_chunked
import m5_kernels
from m1_single import SamplingParams
from m5.cuda_on_cpu import Graph, Machine, cuda_on_cpu
from m5_kernels.backends import Backend
from m5_kernels.decoder.hf_decoder import HFDecoder
from m5_kernels.extras.experts.expert_load import RoutedExperts
from m5_kernels.kernels.cuda_graph import own_stream
from milestone_llm.gc_control import gc_paused
from milestone_llm.models.tiny_models import build_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU instead"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),  # of what was never written
]

LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_tokens": 384,
}
LIMITS |= {"max_num_batched_tokens": 20, "long_prefill_token_threshold": 17}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def model() -> Any:
    """Small, as each multiplication is interpreted."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48}
    return build_tiny_model("qwen3", num_hidden_layers=1, **sizes)


def on_device(**fields: Any) -> Any:
    """M5's engine, its model on the device."""
    return m5_kernels.LLMEngine(model().to("cuda:0"), **{**LIMITS, **fields})


@pytest.fixture
def machine() -> Iterator[Machine]:
    """The device."""
    with cuda_on_cpu() as machine:
        yield machine


PROMPTS = [[5, 9, 33], [7, 40, 8, 21, 5, 9], [*range(1, 35)], [45, 3]]
"""The third comes in chunks."""
PARAMS = [
    SamplingParams(max_tokens=8, **GREEDY),
    SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=4, **GREEDY),
    SamplingParams(max_tokens=20, stop_token_ids=[26], **GREEDY),  # its sixth token
]


def tokens(engine: Any, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[list[int]]:
    """What the requests get."""
    return [output.token_ids for output in engine.generate(prompts, params)]


FEW: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 16, "max_num_batched_tokens": 8}
TWO = [[7, 40, 8, 21, 5, 9], [5]], [SamplingParams(max_tokens=3, **GREEDY)] * 2
"""Prompts and parameters for engines of `FEW` rows, where one step of each kind is enough."""


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What M4 gives them on the CPU."""
    found = tokens(m4_prefix_chunked.LLMEngine(model(), **LIMITS))
    assert [len(each) for each in found] == [8, 6, 4, 6]
    return found


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"batch_invariant": True}, marks=pytest.mark.slow)], ids=str
)
def test_replayed_steps_that_overlap_give_the_tokens_of_m4(fields, wanted, machine):
    # so many tokens has the smallest graph of chunks
    engine = on_device(max_num_batched_tokens=64, **fields)
    assert engine.config.async_scheduling
    compiled, before = set(machine.compiled), machine.launches.copy()
    assert tokens(engine) == wanted
    assert machine.num_replays == engine.stats()["steps"]
    kernels = {name for name in machine.launches - before if name.startswith("_")}
    assert len(kernels) > 8
    assert kernels <= compiled  # at the start


def test_all_work_of_an_engine_goes_to_one_stream(machine):
    """Loading, captured steps and others, and the state after an exception; but not the user's."""
    ready = model().to("cuda:0")
    assert machine.streams == {machine.default_stream}
    machine.streams.clear()
    engine = m5_kernels.LLMEngine(ready, **{**LIMITS, **FEW})
    prompts, params = TWO
    tokens(engine, prompts, [replace(each, prompt_logprobs=1) for each in params])
    engine.runner.reset()
    tokens(engine, prompts, params)
    assert len(machine.streams) == 1
    assert machine.default_stream not in machine.streams
    assert machine.stream is machine.default_stream


def test_a_graph_of_the_memory_profile_is_gone_before_others_are_captured(machine, monkeypatch):
    """PyTorch frees, with it, what all other graphs of its stream need (its issue 193402)."""
    graphs: list[weakref.ref[Graph]] = []

    def graph() -> Graph:
        made = Graph(machine)
        graphs.append(weakref.ref(made))
        return made

    monkeypatch.setattr("torch.cuda.CUDAGraph", graph)
    fields = {**LIMITS, "kv_cache_tokens": None, "max_num_batched_tokens": 64}
    with gc_paused():
        engine = m5_kernels.LLMEngine(model().to("cuda:0"), gpu_memory_utilization=1e-5, **fields)
        assert [each() for each in graphs] == [None]
    assert engine.stats()["kv"]["total"] > 1


def test_experts_are_counted_on_the_stream_of_their_engine(machine):
    with own_stream(torch.device("cuda:0")):
        routed = RoutedExperts([0], 4, 8, 2, "cuda:0")
        routed.topk_ids[0].copy_(torch.tensor([[7, 1], [1, 3], [0, 0], [0, 0]]).to("cuda:0"))
    load = routed.begin(SimpleNamespace(rows=[SimpleNamespace(num_new_tokens=2)]))()
    assert load["expert_load"] == {"num_experts": 8, "num_met": 3, "largest_share": 0.5}
    assert len(machine.streams) == 1


def in_modules(chosen: Backend) -> Backend:
    """Hugging Face's modules, although there is a fused decoder."""
    return replace(chosen, decoder=HFDecoder)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no `nonzero`, with which a twin leaves out padding."""
    monkeypatch.setattr("m5_kernels.decoder.load.check_logits", lambda *given: None)


@pytest.mark.usefixtures("unchecked")
def test_modules_are_replayed_after_a_graph_of_them_gave_their_logits(wanted, machine, caplog):
    engine = on_device(max_num_batched_tokens=64, adapt_backend=in_modules)
    before = machine.num_replays
    assert before == 1
    assert tokens(engine) == wanted
    assert machine.num_replays - before == engine.stats()["steps"]
    [line] = caplog.messages
    assert line.startswith("Hugging Face's modules in CUDA graphs compute this model")
    assert engine.stats()["decoder"] == "Hugging Face's modules in CUDA graphs"


class Asks:
    """A hook that waits for the device."""

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> None:
        float(output.sum())


class Remembers:
    """A hook that is another one in every fourth call: a graph has one call, for ever."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return output * (3.0 if self.num_calls == 4 else 1.0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("hook", "reason"), [(Asks(), "captured"), (Remembers(), "it gave other logits than")]
)
def test_modules_that_no_graph_holds_are_launched_and_one_line_says_why(
    hook, reason, machine, caplog, monkeypatch
):
    monkeypatch.setattr("m5_kernels.engine.check_flat", lambda model: None)
    own = model()
    wanted = tokens(m4_prefix_chunked.LLMEngine(own, **{**LIMITS, **FEW}), *TWO)
    own.model.layers[0].mlp.register_forward_hook(hook)
    limits = {**LIMITS, **FEW}
    engine = m5_kernels.LLMEngine(own.to("cuda:0"), adapt_backend=in_modules, **limits)
    assert tokens(engine, *TWO) == wanted
    assert machine.num_replays == (reason != "captured")
    [line] = caplog.messages
    assert line.startswith("Hugging Face's modules compute this model")
    assert reason in line


def test_steps_launched_kernel_by_kernel_give_the_tokens_of_m4():
    """On the device, and without one, as `TRITON_INTERPRET=1` makes a demo do."""
    packages = m4_prefix_chunked, m5_kernels
    engines = [package.LLMEngine(model(), **{**LIMITS, **FEW}) for package in packages]
    wanted, got = (tokens(engine, *TWO) for engine in engines)
    assert got == wanted
    with cuda_on_cpu() as machine:
        assert tokens(on_device(**FEW, enforce_eager=True), *TWO) == wanted
    assert machine.num_replays == 0


@pytest.mark.slow
def test_guesses_of_the_device_give_the_tokens_of_m4(machine):
    prompts = [[5, 9, 33, 7] * 4, [8, 21] * 5]
    params = [
        SamplingParams(max_tokens=9, frequency_penalty=-0.5, presence_penalty=0.1, **GREEDY),
        SamplingParams(seed=3, max_tokens=6),
    ]
    wanted = tokens(m4_prefix_chunked.LLMEngine(model(), **LIMITS), prompts, params)
    engine = on_device(speculation="ngram")
    assert tokens(engine, prompts, params) == wanted
    assert machine.num_replays > 2
    assert any("propose" in name for name in machine.launches)


@pytest.mark.slow
def test_what_sampling_may_need_gives_the_tokens_of_m4(machine):
    """Filters, penalties, log-probabilities, prompt log-probabilities, several completions."""
    prompts = [[5, 9, 33], [7, 40, 8], [3, 4, 5, 6]]
    params = [
        SamplingParams(seed=1, max_tokens=5, top_k=9, top_p=0.9, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=2, max_tokens=4, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(seed=3, max_tokens=3, n=2, frequency_penalty=-2, logit_bias={9: 4.0}),
    ]
    expected = m4_prefix_chunked.LLMEngine(model(), **LIMITS).generate(prompts, params)
    engine = on_device()
    for _ in range(2):  # captured, and then only replayed
        for wanted, got in zip(expected, engine.generate(prompts, params), strict=True):
            assert numbers(got.prompt_logprobs) == about(wanted.prompt_logprobs)
            for one, other in zip(got.outputs, wanted.outputs, strict=True):
                assert one.token_ids == other.token_ids
                assert numbers(one.logprobs) == about(other.logprobs)


def numbers(logprobs: Any) -> list[dict[int, float]]:
    """Log-probabilities by token, of each position that has some."""
    positions = [entries for entries in logprobs or () if entries]
    return [{token: each.logprob for token, each in entries.items()} for entries in positions]


def about(logprobs: Any) -> list[Any]:
    """The same to rounding."""
    return [pytest.approx(entries, abs=1e-4) for entries in numbers(logprobs)]


@pytest.mark.slow
def test_blocks_that_are_swapped_come_back(machine):
    fields: dict[str, Any] = {**LIMITS, "kv_cache_tokens": 24, "max_model_len": 24}
    fields |= {"preemption": "swap", "swap_space_tokens": 128, "enable_prefix_caching": False}
    params = SamplingParams(max_tokens=9, **GREEDY)
    prompts = [[5, 9, 33, 8, 1, 6, 7], [7, 40, 8, 21, 5, 9]]
    wanted = tokens(m4_prefix_chunked.LLMEngine(model(), **fields), prompts, params)
    engine = m5_kernels.LLMEngine(model().to("cuda:0"), **fields)
    assert tokens(engine, prompts, params) == wanted
    assert machine.launches["copy to the host"] > 0
