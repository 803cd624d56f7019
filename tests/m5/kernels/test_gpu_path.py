"""The whole engine on its GPU path, on a device that stands in for a GPU (`cuda_on_cpu`).

Graphs are captured and replayed, steps overlap, copies are under way, kernels are compiled at the
start. What was planted here once, to see that the stand-in sees it, stays planted.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import m4_prefix_chunked
import m5_kernels
from count_launches import launches_of_step
from cuda_on_cpu import Event, Graph, Machine, MisuseError, cuda_on_cpu
from m1_single import SamplingParams
from m5_kernels.kernels.backend import tl, triton
from milestone_llm.core.allowed_tokens import AllowedTokens
from milestone_llm.models.tiny_models import build_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU instead"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),  # of what was never written
]

LIMITS = {"max_num_seqs": 4, "max_model_len": 96, "block_size": 4, "kv_cache_tokens": 384}
LIMITS |= {"max_num_batched_tokens": 20, "long_prefill_token_threshold": 17}
GREEDY = {"temperature": 0, "ignore_eos": True}


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


# --- the engine ---------------------------------------------------------------------------------


def test_replayed_steps_that_overlap_give_the_tokens_of_m4(wanted, machine):
    engine = on_device(max_num_batched_tokens=64)  # so many tokens has the smallest graph of chunks
    assert engine.core.can_run_ahead is not None
    compiled, before = set(machine.compiled), machine.launches.copy()
    assert tokens(engine) == wanted
    assert machine.num_replays == engine.stats()["steps"]
    kernels = {name for name in machine.launches - before if name.startswith("_")}
    assert len(kernels) > 8
    assert kernels <= compiled  # at the start


def test_steps_launched_kernel_by_kernel_give_the_tokens_of_m4(wanted, machine):
    assert tokens(on_device(enforce_eager=True)) == wanted
    assert machine.num_replays == 0


def test_graphs_captured_at_the_start_are_those_that_steps_replay(machine, monkeypatch):
    wanted = tokens(m4_prefix_chunked.LLMEngine(model(), **{**LIMITS, **FEW}), *TWO)
    engine = on_device(**FEW)
    engine.capture_graphs()
    monkeypatch.setattr(Graph, "capture_begin", None)
    assert tokens(engine, *TWO) == wanted
    assert machine.num_replays > 0


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


class Odd(AllowedTokens):
    """Odd tokens alone, and after two of them even ones."""

    num_allowed = 25

    def bits(self, output_token_ids: Any) -> torch.Tensor:
        words = 0x55555555 << (len(output_token_ids) < 2)
        return torch.tensor([words, words], dtype=torch.int64).to(torch.uint32).view(torch.int32)


def test_rules_which_tokens_are_allowed_give_the_tokens_of_m4(machine):
    """Of one request; when it has gone, its row allows every token again."""
    prompts = [[7, 40, 8, 21, 5, 9], [5], [9, 2]]
    params = [SamplingParams(max_tokens=3, seed=number, ignore_eos=True) for number in range(3)]
    engines = [m4_prefix_chunked.LLMEngine(model(), **{**LIMITS, **FEW}), on_device(**FEW)]
    for engine in engines:
        engine.input_processor.grammars.rule_of = lambda each: None if each.seed else Odd()
    wanted, got = (tokens(engine, prompts, params) for engine in engines)
    assert got == wanted
    assert [token % 2 for token in got[0]] == [1, 1, 0]
    assert machine.num_replays > 0


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


@pytest.mark.slow
def test_a_replay_launches_what_the_step_launches_without_a_graph():
    replayed, eager = (
        launches_of_step(1, [*range(1, 20)], enforce_eager, "bfloat16", num_layers=1)
        for enforce_eager in (False, True)
    )
    assert replayed == eager
    assert replayed["_rope_kv_write_kernel"] == 1


# --- mistakes in the engine ---------------------------------------------------------------------


def test_pinned_memory_that_is_used_again_too_early_is_seen(wanted, machine, monkeypatch):
    """As if what is sent to the device had one buffer for all steps."""
    make, buffers = torch.tensor, dict[Any, Any]()

    def tensor(data: Any, **options: Any) -> Any:
        made = make(data, **options)
        if not options.get("pin_memory"):
            return made
        kept = buffers.setdefault(made.dtype, torch.empty(4096, dtype=made.dtype, pin_memory=True))
        return kept[: made.numel()].view(made.shape).copy_(made)

    engine = on_device()
    monkeypatch.setattr(torch, "tensor", tensor)
    with pytest.raises(MisuseError, match="written while a copy from it is under way"):
        tokens(engine)


def test_tokens_for_which_nobody_waits_are_seen(wanted, machine, monkeypatch):
    engine = on_device()
    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", lambda event: None)
        with pytest.raises(MisuseError, match="the device has yet to write"):
            tokens(engine)


def test_graphs_whose_memory_is_given_back_are_seen(machine):
    engine = on_device(**FEW)
    tokens(engine, *TWO)
    engine.decoder.final_norm = engine.decoder.final_norm.clone()
    with pytest.raises(MisuseError, match="given back after it was captured"):
        tokens(engine, *TWO)


@pytest.mark.slow
def test_an_engine_that_goes_while_a_step_is_under_way_waits_for_it(machine):
    engine = on_device(**FEW)
    engine.add_request([5, 9, 33], SamplingParams(max_tokens=9, **GREEDY))
    for _ in range(3):
        engine.step()
    assert not torch.cuda.current_stream().query()
    del engine
    gc.collect()
    torch.cuda.synchronize()


@pytest.mark.slow
def test_no_launch_can_be_left_out(machine, monkeypatch):
    """Memory that was not written holds nothing that would do."""
    run, left_out = Machine.launch_triton, set[str]()

    def launch(self: Machine, kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        if kernel.fn.__name__ not in left_out or warmup:
            run(self, kernel, *args, warmup=warmup, **options)

    monkeypatch.setattr(Machine, "launch_triton", launch)
    wanted = tokens(on_device(**FEW), *TWO)
    names = [name for name in machine.launches if name.startswith("_")]
    unseen = []
    for name in names:
        left_out.clear()
        engine = on_device(**FEW)
        left_out.add(name)
        try:
            if tokens(engine, *TWO) == wanted:
                unseen.append(name)
        except Exception:  # whatever nonsense leads to
            pass
    assert len(names) > 8
    assert unseen == []


# --- mistakes of a few lines --------------------------------------------------------------------


def captured(work: Any) -> Any:
    """A graph of it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    return graph


@triton.jit
def _copy_kernel(source, target, number: tl.constexpr):
    index = tl.arange(0, number)
    tl.store(target + index, tl.load(source + index))


def test_work_is_done_when_somebody_waits(machine):
    numbers = torch.ones(4, device="cuda:0")
    numbers += 1
    done = torch.cuda.Event()
    done.record()
    numbers += 1
    assert torch.isnan(numbers.cpu_tensor).all()
    done.synchronize()
    assert numbers.cpu_tensor.tolist() == [2] * 4
    assert numbers.tolist() == [3] * 4


def test_a_stream_waits_for_no_other_unless_it_is_told(machine):
    numbers, side = torch.zeros(2, device="cuda:0"), torch.cuda.Stream()
    torch.cuda.synchronize()
    numbers += 1
    with torch.cuda.stream(side):
        assert (numbers + 1).tolist() == [1, 1]
        side.wait_stream(torch.cuda.Stream())
        side.wait_event(torch.cuda.Event())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert (numbers + 1).tolist() == [2, 2]


def test_a_capture_computes_nothing_and_a_replay_reads_what_is_there(machine):
    source, target = torch.ones(2, device="cuda:0"), torch.zeros(2, device="cuda:0")
    graph = captured(lambda: target.copy_(source * 2))
    assert target.tolist() == [0, 0]
    source.fill_(4)
    graph.replay()
    assert target.tolist() == [8, 8]


def test_memory_of_a_graph_is_empty_at_each_replay(machine):
    kept: list[Any] = []
    graph = captured(lambda: kept.append(torch.empty(2, device="cuda:0")))
    kept[0].fill_(1)
    assert kept[0].tolist() == [1, 1]
    graph.replay()
    assert torch.isnan(kept[0].cpu()).all()


def test_a_graph_without_its_memory_is_not_replayed(machine):
    sources, target = [torch.ones(2, device="cuda:0")], torch.zeros(2, device="cuda:0")
    graph = captured(lambda: target.copy_(sources[0]))
    graph.replay()
    sources.clear()
    with pytest.raises(MisuseError, match="given back"):
        graph.replay()


@pytest.mark.parametrize(
    "wait",
    [
        lambda numbers: numbers.tolist(),
        lambda numbers: numbers[0].item(),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: numbers.copy_(torch.ones(2)),
        lambda numbers: torch.tensor([1], device="cuda:0"),
        lambda numbers: torch.cuda.synchronize(),
    ],
)
def test_who_waits_in_a_capture_is_seen(wait, machine):
    numbers = torch.ones(2, device="cuda:0")
    with pytest.raises(MisuseError, match="captured"):
        captured(lambda: wait(numbers))


def test_kernels_stay_within_their_tensors(machine):
    source, target = torch.ones(8, device="cuda:0"), torch.empty(8, device="cuda:0")
    _copy_kernel[(1,)](source, target, number=8)
    assert target.tolist() == [1] * 8
    for arguments in ((source, target[4:]), (source[4:], target)):
        _copy_kernel[(1,)](*arguments, number=8)
        with pytest.raises(interpreter_error(), match="outside"):
            torch.cuda.synchronize()


def interpreter_error() -> type[Exception]:
    """What Triton makes of an exception in a kernel."""
    from triton.runtime.interpreter import InterpreterError

    return InterpreterError


def test_pinned_memory_that_a_kernel_uses_must_live(machine):
    source, target = torch.ones(8, device="cuda:0"), torch.empty(8, pin_memory=True)
    _copy_kernel[(1,)](source, target, number=8)
    with pytest.raises(MisuseError, match="yet to write"):
        target.tolist()
    torch.cuda.synchronize()
    assert target.tolist() == [1] * 8
    _copy_kernel[(1,)](source, target, number=8)
    del target
    with pytest.raises(MisuseError, match="given back while a kernel"):
        torch.cuda.synchronize()


def test_a_place_that_one_scatter_writes_twice_is_seen(machine):
    numbers, places = torch.zeros(4, device="cuda:0"), torch.tensor([1, 3, 1]).to("cuda:0")
    numbers[places[:2]] = torch.ones(2, device="cuda:0")
    numbers[places] = torch.ones(3, device="cuda:0")
    with pytest.raises(MisuseError, match="twice"):
        torch.cuda.synchronize()


def test_copies_that_are_under_way_are_left_alone(machine):
    host, device = torch.ones(2, pin_memory=True), torch.zeros(2, device="cuda:0")
    device.copy_(host, non_blocking=True)
    assert host.tolist() == [1, 1]
    with pytest.raises(MisuseError, match="written while a copy from it"):
        host.fill_(2)
    torch.cuda.synchronize()
    host.fill_(2)
    host.copy_(device, non_blocking=True)
    with pytest.raises(MisuseError, match="yet to write"):
        host.tolist()
    with pytest.raises(MisuseError, match="not pinned"):
        torch.empty(2).copy_(device, non_blocking=True)
