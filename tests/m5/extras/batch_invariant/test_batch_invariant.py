"""`batch_invariant=True`: tokens and log-probabilities of a request, bit for bit.

Each way in which others can change a request's sums has a case. There the request has the bits that
it has alone, and no longer has them if the object that prevents it is taken out again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from helpers.m5_models import circling
from m1_single import SamplingParams
from m5_kernels import LLMEngine
from m5_kernels.backends import Backend
from m5_kernels.decoder.attention import Attention
from m5_kernels.decoder.linear import LinearMethod
from m5_kernels.extras.devices import cpu_ops
from m5_kernels.extras.devices.cpu_attention import CPUAttention
from m5_kernels.extras.devices.cpu_linear import CPULinear
from m5_kernels.extras.families.mlp import FamilyMLP
from milestone_llm.core.logprobs import logprob_columns
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS: dict[str, Any] = {
    "batch_invariant": True,
    "max_num_seqs": 24,
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_tokens": 24 * 96,
    "max_num_batched_tokens": 256,
}
ALONE: dict[str, Any] = {"max_num_seqs": 2, "enable_prefix_caching": False}


def facts(output: Any) -> list[Any]:
    """What must be the same: all tokens, and all log-probabilities as they are."""
    return [output.prompt_logprobs, *((each.token_ids, each.logprobs) for each in output.outputs)]


def prompt_of(length: int, seed: float = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
WATCHED = prompt_of(45)
"""The request that is compared."""


# --- one source of difference after the other ----------------------------------------------------


def with_linear(chosen: Backend) -> Backend:
    """Multiply as without `batch_invariant`."""
    linear = CPULinear() if not torch.cuda.is_available() else LinearMethod()
    return replace(chosen, ops=replace(chosen.ops, linear=linear))


def with_attention(chosen: Backend) -> Backend:
    """Attend as without `batch_invariant`."""
    attention: Any = CPUAttention if not torch.cuda.is_available() else Attention
    return replace(chosen, ops=replace(chosen.ops, attention=attention))


def with_norm(chosen: Backend) -> Backend:
    """Add and normalise as without `batch_invariant`, on a CPU."""
    embed_norm, norm = cpu_ops.embed_norm, cpu_ops.add_norm
    ops = replace(chosen.ops, embed_norm=embed_norm, add_norm=norm, last_norm=norm)
    return replace(chosen, ops=ops)


def with_mlp(chosen: Backend) -> Backend:
    """Activate all rows together, on a CPU."""
    return replace(chosen, ops=replace(chosen.ops, mlp=FamilyMLP.create))


@dataclass(frozen=True)
class Case:
    """What others do, and which object keeps their sums apart."""

    planted: Callable[[Backend], Backend]
    fields: dict[str, Any] = field(default_factory=dict)
    others: tuple[int, ...] = ()
    """Lengths of the prompts that come before the watched one."""
    before: int = 0
    """Tokens of the watched prompt that are served first, for the prefix cache."""
    dtype: str = "bfloat16"
    family: str = "qwen3"
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config."""
    max_tokens: int = 20
    happens: tuple[str, ...] = ()
    """A figure of the engine that must not be 0."""


CASES = {
    "row count": Case(with_linear, others=(5, 9, 13), dtype="float32"),
    "rows of a norm": Case(with_norm, others=(1,) * 20, dtype="float32"),
    "rows of an activation": Case(  # 100 neurons are no whole number of vectors
        with_mlp, others=(5, 9, 13), dtype="float32", family="gpt2", overrides={"n_inner": 100}
    ),
    "neighbours of other lengths": Case(with_attention, others=(40, 50, 47)),
    "chunks": Case(with_attention, {"long_prefill_token_threshold": 7}),
    "a cache hit": Case(with_attention, before=30, happens=("prefix_cache", "saved_tokens")),
    "preemption": Case(
        with_attention,
        {"kv_cache_tokens": 124, "enable_prefix_caching": False},
        others=(60,),
        happens=("preemptions",),
    ),
    "draft tokens": Case(
        with_linear,
        {"speculation": "ngram"},
        dtype="float32",
        max_tokens=40,  # the device's proposals come a step later than the host's
        happens=("spec_decode_num_accepted_tokens",),
    ),
}


def watched(case: Case, device: str, adapt: Callable[[Backend], Backend]) -> list[list[Any]]:
    """Return the facts of the watched request alone, and among others."""
    params = replace(PARAMS, max_tokens=case.max_tokens)
    build = circling if "speculation" in case.fields else build_tiny_model
    model = build(case.family, **case.overrides).to(getattr(torch, case.dtype)).to(device)
    found = []
    for fields, others, before in (
        (ALONE, (), 0),
        (case.fields, case.others, case.before),
    ):
        engine = LLMEngine(model, adapt_backend=adapt, device=device, **{**LIMITS, **fields})
        if before:
            engine.generate(WATCHED[:before], params)
        prompts = [prompt_of(length, seed=1 + i) for i, length in enumerate(others)]
        found.append(facts(engine.generate([*prompts, WATCHED], params)[-1]))
        if fields is case.fields:
            figure: Any = engine.stats()
            for name in case.happens:
                figure = figure[name]
            assert figure, f"{case.happens} did not happen"
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_a_request_has_the_bits_that_it_has_alone(name, device):
    alone, among = watched(CASES[name], device, lambda chosen: chosen)
    assert alone == among


@pytest.mark.parametrize("name", CASES)
def test_without_its_object_it_has_not(name):
    """Or the test above could not fail."""
    if torch.cuda.is_available():
        pytest.skip("the objects of a CPU")
    alone, among = watched(CASES[name], "cpu", CASES[name].planted)
    assert alone != among


# --- everything together -------------------------------------------------------------------------


def traffic(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests that share beginnings, sample in every way, and ask for log-probabilities."""
    rng = random.Random(seed)
    stems = [prompt_of(20, rng.random()) for _ in range(2)]
    prompts, params = [], []
    for i in range(14):
        prompts.append([*rng.choice([*stems, []]), *prompt_of(rng.randint(1, 24), rng.random())])
        params.append(
            SamplingParams(
                temperature=rng.choice((0, 0.8)),
                top_p=rng.choice((1, 0.9)),
                seed=i,
                max_tokens=rng.randint(4, 24),
                ignore_eos=True,
                logprobs=rng.choice((1, 3)),
                prompt_logprobs=rng.choice((None, 2)),
                repetition_penalty=rng.choice((1, 1, 1.2)),
                n=rng.choice((1, 1, 2)),
            )
        )
    return prompts, params


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_traffic_with_everything_on(family, device):
    """Chunks, hits, preemption, drafts, pipelined steps, graphs; fp8 keys and values with one."""
    seed = len(family)
    prompts, params = traffic(seed)
    model = circling(family).to(torch.bfloat16) if family in ("llama", "qwen3") else None
    model = (model or build_tiny_model(family).to(torch.bfloat16)).to(device)
    limits = {**LIMITS, "kv_cache_dtype": "fp8" if family == "llama" else "auto"}
    storm: dict[str, Any] = {
        "max_num_seqs": 6,
        "kv_cache_tokens": 160,
        "max_num_batched_tokens": 30,
        "long_prefill_token_threshold": 11,
        "speculation": "ngram",
        "async_scheduling": True,
        "preemption": "swap" if family == "qwen3" else "recompute",
        "swap_space_tokens": 100,
    }
    engine = LLMEngine(model, device=device, **{**limits, **storm})
    found = [facts(output) for output in engine.generate(prompts, params)]
    stats = engine.stats()
    assert stats["preemptions"]
    assert stats["prefix_cache"]["saved_tokens"]
    if family in ("llama", "qwen3"):
        assert stats["spec_decode_num_accepted_tokens"]
    alone = LLMEngine(model, device=device, **{**limits, **ALONE})
    for prompt, own, facts_among in zip(prompts, params, found, strict=True):
        assert facts(alone.generate(prompt, own)[0]) == facts_among


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_real_shapes_on_a_gpu(fields):
    """Rows of all sizes, contexts of several splits."""
    prompts, params = traffic(3)
    prompts = [prompt * rng for prompt, rng in zip(prompts, [1, 30, 7, 60] * 4, strict=False)]
    limits = {"batch_invariant": True, "max_model_len": 4096, "kv_cache_tokens": 40960}
    name = "random-qwen3-0.6b"
    torch.manual_seed(0)  # of the weights
    alone = LLMEngine(name, **{**limits, **ALONE}, max_num_batched_tokens=4096)
    wanted = [facts(alone.generate(*each)[0]) for each in zip(prompts, params, strict=True)]
    torch.manual_seed(0)
    engine = LLMEngine(
        name, **limits, **fields, speculation="ngram", max_num_batched_tokens=700, max_num_seqs=64
    )
    assert [facts(output) for output in engine.generate(prompts, params)] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [50257, 32001, 32000])
def test_log_probabilities_of_any_vocabulary(vocab_size):
    """A row of an odd size begins anywhere in memory."""
    raw = torch.randn(40, vocab_size, device="cuda")
    tokens = torch.arange(40, device="cuda")
    together = logprob_columns(raw, tokens, 3)
    for row in range(40):
        own = slice(row, row + 1)
        assert torch.equal(logprob_columns(raw[own].clone(), tokens[own], 3), together[own])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", {"quantization": "int8"}, 'sums of quantization="int8"'),
        ("llama", {"quantization": "fp8"}, 'sums of quantization="fp8"'),
        ("llama", {"quantization": "gguf"}, 'sums of quantization="gguf"'),
        ("llama", {"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ("qwen3-moe", {}, "experts of qwen3_moe"),
        ("deepseek-v3", {}, "no fused decoder for 'deepseek_v3'"),
    ],
)
def test_what_does_not_keep_the_promise_is_refused(family, fields, reason):
    with pytest.raises(ValueError, match=f"batch_invariant=True: .*{reason}"):
        LLMEngine(f"tiny-{family}", batch_invariant=True, max_model_len=64, device="cpu", **fields)


def test_rows_of_a_weight_that_are_no_multiple_of_16_bytes_are_refused():
    model = build_tiny_model("llama", intermediate_size=33)
    with pytest.raises(ValueError, match="batch_invariant=True: rows of 33 numbers"):
        LLMEngine(model, batch_invariant=True, max_model_len=64, device="cpu")


def test_a_model_that_does_what_its_config_does_not_say_is_refused():
    model = build_tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] * 2)
    with pytest.raises(ValueError, match="something else: a hook"):
        LLMEngine(model, batch_invariant=True, max_model_len=64, device="cpu")
