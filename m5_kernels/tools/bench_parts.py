"""The parts of M5 that the bench can switch off, and the check that M5's tokens are M4's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import m4_prefix_chunked
from m5_kernels.backends import Backend
from m5_kernels.decoder.attention import Attention
from m5_kernels.decoder.hf_decoder import HFDecoder
from m5_kernels.decoder.linear import LinearMethod
from m5_kernels.engine import LLMEngine
from m5_kernels.extras.batch_invariant.invariant_linear import InvariantLinear
from m5_kernels.extras.batch_invariant.split_attention import SplitAttention
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear
from m5_kernels.extras.devices.hopper_chunks import hopper_attention
from m5_kernels.extras.experts.moe_mlp import CreateMLP
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.pdl import NEVER
from m5_kernels.kernels.rms_norm import add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.to_host import copy_to_host
from milestone_llm.lab.bench.workloads import random_tokens
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

FIELDS: dict[str, dict[str, Any]] = {
    "graphs": {"enforce_eager": True},  # without graphs there is no pipelining either
    "pipelining": {"async_scheduling": False},
    "prefix-cache": {"enable_prefix_caching": False},
    "chunks": {"enable_chunked_prefill": False},
    "eight-bits": {"quantization": None},
    "guesses": {"speculation": None},
    "tensor-parallel": {"tensor_parallel_size": 1},
    "invariance": {"batch_invariant": False},
}
"""Parts that `--without` switches off by a field of the configuration."""


def twin_of(twin: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that takes the place of a launcher, and runs the torch twin."""

    def compute(*args: Any) -> torch.Tensor:
        *given, launch = args
        assert isinstance(launch, Launch), "the last argument of each launch of a layer"
        return twin(*given)

    return compute


def without_hopper(chosen: Backend) -> Backend:
    """Use the lesson's linear layers, its attention of chunks, and its copy to the host."""
    ops = chosen.ops
    if isinstance(ops.linear, FewRowsLinear):
        ops = replace(ops, linear=LinearMethod(ops.linear.one_row, ops.linear.activate))
    if ops.attention is hopper_attention:
        ops = replace(ops, attention=Attention)
    return replace(chosen, ops=ops, copy=copy_to_host)


def without_pdl(chosen: Backend) -> Backend:
    """Start no kernel early, and use no linear layers that gain by it."""
    linear = chosen.ops.linear
    if isinstance(linear, FewRowsLinear):
        linear = replace(linear, has_register=False, may_start_early=False)
    return replace(chosen, launch=Launch(pdl=NEVER), ops=replace(chosen.ops, linear=linear))


def without_add_norm(chosen: Backend) -> Backend:
    """Add and normalise with torch."""
    ops = replace(chosen.ops, add_norm=twin_of(add_rms_norm_torch))
    if isinstance(ops.mlp, CreateMLP):
        ops = replace(ops, mlp=replace(ops.mlp, returns_pairs=False))
    return replace(chosen, ops=ops)


def without_rope_kv(chosen: Backend) -> Backend:
    """Normalise heads, rotate them and write KV with torch."""
    ops = replace(chosen.ops, rope_kv_write=twin_of(rope_kv_write_torch))
    return replace(chosen, ops=ops)


def without_silu_mul(chosen: Backend) -> Backend:
    """Compute SiLU * mul with torch, where it comes after a linear layer and is not part of it."""
    linear = replace(chosen.ops.linear, activate=twin_of(silu_mul_torch))
    return replace(chosen, ops=replace(chosen.ops, linear=linear))


def without_skinny_linear(chosen: Backend) -> Backend:
    """Use the library's linear layers, if it supports the weights."""
    linear = chosen.ops.linear
    if isinstance(linear, FewRowsLinear) or type(linear) is LinearMethod:
        linear = LinearMethod(one_row=None, activate=linear.activate)
    return replace(chosen, ops=replace(chosen.ops, linear=linear))


def without_invariant_linear(chosen: Backend) -> Backend:
    """Use the linear layers that a GPU has without `batch_invariant`."""
    ops = chosen.ops
    if isinstance(ops.linear, InvariantLinear):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ops = replace(ops, linear=FewRowsLinear.on(device))
    return replace(chosen, ops=ops)


def without_invariant_attention(chosen: Backend) -> Backend:
    """Use the attention that a Hopper has without `batch_invariant`."""
    ops = chosen.ops
    if ops.attention is SplitAttention:
        ops = replace(ops, attention=hopper_attention)
    return replace(chosen, ops=ops)


def without_fused(chosen: Backend) -> Backend:
    """Compute with Hugging Face's modules, also if there is a fused decoder."""
    return replace(chosen, decoder=HFDecoder)


OBJECTS: dict[str, Callable[[Backend], Backend]] = {
    "add-norm": without_add_norm,
    "rope-kv": without_rope_kv,
    "silu-mul": without_silu_mul,
    "skinny-linear": without_skinny_linear,
    "pdl": without_pdl,
    "hopper": without_hopper,
    "fused": without_fused,
    "invariant-linear": without_invariant_linear,
    "invariant-attention": without_invariant_attention,
}
"""Parts that `--without` switches off by changing the backend before an engine is built."""


def check_against_m4(device: str) -> str:
    """Serve a small mixed load in fp32 with M4 and with M5 on this device, and compare the tokens.

    Half of the requests are greedy, half seeded. Memory is short, so that some are preempted.

    Raises:
        RuntimeError: the tokens differ. Then no speed is worth reporting.
    """
    model = build_tiny_model("qwen3").to(device)
    items = random_tokens(12, (3, 60), (4, 24), vocab_size=VOCAB_SIZE, seed=7)
    prompts = [item.prompt for item in items]
    params = [
        replace(item.params, temperature=0.8 * (index % 2), seed=index)
        for index, item in enumerate(items)
    ]
    m4 = m4_prefix_chunked.LLMEngine
    expected: list[list[int]] | None = None
    for name, kind, fields in (
        ("M4", m4, {"max_num_seqs": 1}),
        ("M4, batched", m4, {}),
        ("M5", LLMEngine, {}),
        ("M5, eager", LLMEngine, {"enforce_eager": True}),
    ):
        limits: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 96, "kv_cache_tokens": 192}
        engine = kind(model, **{**limits, "max_num_batched_tokens": 48, **fields})
        tokens = [output.token_ids for output in engine.generate(prompts, params)]
        expected = expected or tokens
        if tokens != expected:
            raise RuntimeError(f"{name} does not give the tokens of M4 with one request at a time")
    return (
        f"{len(items)} requests (fp32, tiny-qwen3, half of them sampled): M4 alone and batched, "
        "M5 pipelined and eager give the same tokens"
    )
