"""What is compiled before the first step is all that any step launches.

Here nothing is compiled or launched: a launch is noted, with what Triton makes kernels of their own
for. On a GPU, `test_no_kernel_is_left_to_compile` watches the compiler itself.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import m5_kernels
from helpers.engines import make_engine, tiny_model
from m5_kernels import runner as runner_file
from m5_kernels.compiled_shapes import shapes_of_all_kernels
from m5_kernels.config import EngineConfig
from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.ops import DecoderOps
from m5_kernels.device_state import DeviceState
from m5_kernels.device_step import DeviceStep
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear
from m5_kernels.extras.quantization.int8_method import Int8Linear
from m5_kernels.extras.spec_decode import spec_decode_runner as spec_decode_file
from m5_kernels.extras.spec_decode.spec_decode_runner import shape_of
from m5_kernels.extras.spec_decode.verification_attention import (
    MANY_POSITIONS,
    verification_workspace,
)
from m5_kernels.kernels.flash_decode import DecodeWorkspace
from m5_kernels.kernels.launch import PLAIN, Launch, compiling
from m5_kernels.kernels.pdl import LATE
from m5_kernels.sampler import SamplingFeatures
from m5_kernels.step_graphs import MAX_CHUNKS, MAX_TOKENS, StepShape

triton = pytest.importorskip("triton")
NEEDS = [
    SamplingFeatures(*each)
    for each in itertools.product((False, True), repeat=len(SamplingFeatures._fields))
]


@dataclass(frozen=True)
class Noting(Launch):
    """Runs and compiles nothing, and notes what it was to launch: each kernel with its constants
    and what is known of its numbers."""

    launched: set[tuple[Any, ...]] = field(default_factory=set)

    def runs_triton(self, tensor: torch.Tensor) -> bool:
        return True

    def kernel(self, kernel: Any, grid: Any) -> Callable[..., None]:
        def note(*args: Any, **options: Any) -> None:
            values = dict(zip(kernel.arg_names, args, strict=False)) | options
            known = {name: value_known(value) for name, value in values.items()}
            for param in kernel.params:
                if param.is_constexpr:
                    known[param.name] = values.get(param.name)
                elif param.do_not_specialize:
                    known[param.name] = None
            self.launched.add((kernel.fn.__name__, *sorted(known.items(), key=str)))

        return note


def expect_its_launch_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a launcher is not handed the launch of its step, and takes its own default."""

    def fail(*arguments: Any) -> None:
        raise AssertionError("a launcher was not handed the launch of its step")

    for name in ("runs_triton", "kernel"):
        monkeypatch.setattr(Launch, name, fail)


def value_known(value: Any) -> Any:
    """What Triton knows of an argument when it compiles."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return 1 if value == 1 else value % 16 == 0
    if hasattr(value, "block_shape"):  # what the copy engine of Hopper is told
        return value.base.dtype, tuple(value.block_shape), value.layout
    return value


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "num_that_guess"),
    [(150, MAX_TOKENS + 200, 30), (600, 600, 0), (9, 50, 5)],
)
@torch.inference_mode()
def test_no_step_launches_a_kernel_that_was_not_compiled(
    monkeypatch, max_num_seqs, max_tokens, num_that_guess
):
    monkeypatch.setattr("m5_kernels.backends.runs_no_kernels", lambda device: False)
    fields: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_tokens}
    if num_that_guess:
        fields |= {"speculation": "ngram", "speculation_max_num_seqs": num_that_guess}
    engine = make_engine(m5_kernels, tiny_model(), **fields)
    runner = engine.runner.runner if num_that_guess else engine.runner
    step, shape = runner.device_step, engine.decoder.config
    step.launch = noting = Noting()
    sizes = shape.num_q_heads, shape.num_kv_heads, shape.head_dim, torch.float32
    step.attention.workspace = DecodeWorkspace.allocate(
        step.state.num_seqs, *sizes, torch.device("cpu")
    )
    if num_that_guess:
        guesses = engine.runner
        assert guesses.max_positions == 4 * num_that_guess
        guesses.step.attention.workspace = verification_workspace(
            guesses.max_positions, *sizes, torch.device("cpu")
        )
    expect_its_launch_everywhere(monkeypatch)
    compile_kernels(monkeypatch, engine.runner)
    compiled = set(noting.launched)
    larger = [
        StepShape(num_tokens, n, n - chunks, chunks)
        for num_tokens in (step.max_tokens,)
        for n in (33, max_num_seqs)
        for chunks in (1, 20)
        if chunks <= n <= max_num_seqs
    ]
    exact = [StepShape(n, n, n, 0) for n in (3, 7)]  # with prompt_logprobs there is no bucket
    buckets = runner.buckets.all()
    for each in [*buckets[::7], *buckets[-8:], *larger, *exact]:
        for needs in NEEDS if each.num_tokens <= 16 else NEEDS[:1]:
            step.compute(each, needs)
    assert noting.launched == compiled
    assert max_tokens < 64 or any(each.num_chunks == MAX_CHUNKS for each in buckets)
    if num_that_guess:
        has_many = guesses.max_positions >= MANY_POSITIONS
        assert any(name == "_attend_drafts_kernel" for name, *_ in compiled) == has_many
        sizes = [2, 3, 7, 31, 32, 33, *guesses.sizes]
        for number in (n for n in sizes if 1 < n <= guesses.max_positions):
            for needs in NEEDS if number <= 16 else NEEDS[:1]:
                guesses.step.compute(shape_of(number), needs)
        assert noting.launched == compiled


def compile_kernels(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """`runner.compile_kernels()` as on a GPU, where launches are noted instead of compiled."""
    plain = getattr(runner, "runner", runner)
    with monkeypatch.context() as patch:
        patch.setattr(plain.cache, "device", SimpleNamespace(type="cuda"))
        for module in (runner_file, spec_decode_file):
            patch.setattr(module, "compiling", contextlib.nullcontext)
        runner.compile_kernels()


@pytest.mark.parametrize(
    ("is_int8", "sizes"), [(False, (1024, 3072, 16, 8)), (True, (1536, 8960, 12, 2))]
)
@torch.inference_mode()
def test_nor_does_a_step_on_hopper(monkeypatch, is_int8, sizes):
    """Of a layer and LM head of real size: small weights in bf16, large ones in eight bits."""
    pytest.importorskip("m5_kernels.extras.quantization.hopper_int8")
    for module in [each for name, each in sys.modules.items() if name.startswith("m5_kernels.")]:
        for name in {"is_hopper", "supports_pdl"} & vars(module).keys():
            monkeypatch.setattr(module, name, lambda device: True)
    max_num_seqs, num_tokens, device = 40, 2048, torch.device("meta")
    shape = DecoderConfig(
        151_936, *sizes, 128, 1e-6, (None,), (0,), True, False, False, False, True
    )
    angles = torch.empty(1, num_tokens, 128, device=device)
    gpu = torch.device("cuda")
    linear = Int8Linear() if is_int8 else FewRowsLinear.on(gpu)
    decoder = FusedDecoder(shape, angles, torch.bfloat16, device, DecoderOps(linear=linear))
    keys, values = zip(*decoder.allocate_caches(1, 16), strict=True)
    cache: Any = SimpleNamespace(group_of_layers=(), keys=keys, values=values, block_size=16)
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens)
    state = DeviceState(max_num_seqs, num_tokens, 16, shape.vocab_size, device)
    step = DeviceStep(decoder, cache, state, config, num_tokens)
    step.launch = noting = Noting(pdl=LATE)
    step.attention.workspace = DecodeWorkspace.allocate(
        max_num_seqs, shape.num_q_heads, shape.num_kv_heads, 128, torch.bfloat16, device
    )
    expect_its_launch_everywhere(monkeypatch)
    counts = decoder.token_counts(num_tokens)
    for each, needs in shapes_of_all_kernels(max_num_seqs, num_tokens, counts):
        step.compute(each, needs)
    compiled = set(noting.launched)
    shapes = [StepShape(n, n, n, 0) for n in range(1, max_num_seqs + 1)]
    shapes += [StepShape(n, 1, 0, 1) for n in (*range(50, num_tokens, 53), num_tokens)]
    for each in shapes:
        step.compute(each, SamplingFeatures())
    assert noting.launched == compiled
    names = {name for name, *_ in compiled}
    own = {"_hopper_linear_kernel", "_register_linear_kernel", "_dot_linear_kernel"}
    assert ({"_hopper_int8_kernel"} if is_int8 else own) <= names


@triton.jit
def a_kernel(pointer):
    """Nothing: it is not compiled."""


def test_while_an_engine_is_built_another_one_launches(monkeypatch):
    """So does this one afterwards, though a kernel did not compile."""
    active_mode = triton.runtime._async_compile.active_mode
    found: list[tuple[str, bool, bool]] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Note the thread, whether it launches, and whether Triton puts off what it compiles."""
        is_put_off = active_mode.get() is not None
        found.append((threading.current_thread().name, not warmup, is_put_off))

    def launch(how: Launch) -> None:
        how.kernel(a_kernel, (1,))(None)

    def fail() -> None:
        raise RuntimeError("it does not compile")

    def build() -> None:
        with compiling():
            thread = threading.Thread(target=launch, args=[PLAIN], name="serving")
            thread.start()
            thread.join()
            launch(Launch(only_compiles=True))
            active_mode.get().submit("key", fail, lambda kernel: None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(triton.JITFunction, "run", run)
    with pytest.raises(RuntimeError, match="it does not compile"):
        build()
    launch(PLAIN)
    here = threading.current_thread().name
    assert found == [("serving", True, False), (here, False, True), (here, True, False)]
