"""Parts of M5 that the bench switches off one by one, and the check that its tokens are M4's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import m4_prefix_chunked
from m5_kernels.decoder.attention import Attention, PagedPrefill
from m5_kernels.decoder.one_gpu import OneGPU
from m5_kernels.decoder.products import Matrix, Products, linear_torch
from m5_kernels.engine import LLMEngine
from m5_kernels.extras.hopper.products import DotProduct, HopperProduct, RegisterProduct
from m5_kernels.kernels.early_start import NEVER, Starts
from m5_kernels.kernels.rms_norm import add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write_torch
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.to_host import HostTokens
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
}
"""What `--without` can switch off by a field of the configuration."""


class TwinOfNorm(OneGPU):
    """Additions and norms by torch."""

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """As the kernel does it, in several."""
        return add_rms_norm_torch(part, residual, weight, epsilon)


class SomeProducts(Products):
    """Products without some of their kernels."""

    has_skinny = has_silu_mul = True

    @classmethod
    def of(cls, engine: Any) -> SomeProducts:
        """An engine's, in the place of those that it had."""
        if not isinstance(engine.decoder.products, cls):
            engine.decoder.products = cls(engine.decoder.products.special)
        products: SomeProducts = engine.decoder.products
        return products

    def linear(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Products.linear`; without skinny-linear, the library's, if it knows such weights."""
        if self.has_skinny or not isinstance(weight, torch.Tensor):
            return super().linear(hidden, weight, bias)
        return linear_torch(hidden, weight, bias)

    def gate_up(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Products.gate_up`. A product that has SiLU * mul in it keeps that."""
        is_in_product = len(hidden) == 1 or any(
            each.suits(hidden, weight, is_gated=True) for each in self.special
        )
        if self.has_skinny and is_in_product:
            return super().gate_up(hidden, weight, bias)
        activate = silu_mul if self.has_silu_mul else silu_mul_torch
        return activate(self.linear(hidden, weight, bias))


class NeverEarly(Starts):
    """Every kernel starts when the one before it has ended."""

    def __init__(self, device: torch.device) -> None:
        self.late = NEVER


def without_hopper(engine: Any) -> None:
    """The lesson's products, its attention of chunks, and its copy to the host."""
    decoder, products = engine.decoder, SomeProducts.of(engine)
    kinds = (RegisterProduct, HopperProduct, DotProduct)
    products.special = [each for each in products.special if not isinstance(each, kinds)]
    if not isinstance(decoder.starts, NeverEarly):
        decoder.starts = Starts(decoder.embedding.device)
    runner = getattr(engine.runner, "runner", engine.runner)  # of guesses
    if isinstance(runner.device_step.attention, Attention):  # on a CPU it is another
        runner.device_step.attention.chunks = PagedPrefill()
    runner.host_tokens = HostTokens(runner.state.num_seqs, decoder.embedding.device)


def without_early_starts(engine: Any) -> None:
    """No kernel starts early, so none of the products that gain by it."""
    products = SomeProducts.of(engine)
    products.special = [each for each in products.special if not isinstance(each, RegisterProduct)]
    engine.decoder.starts = NeverEarly(engine.decoder.embedding.device)


def without_add_norm(engine: Any) -> None:
    """Addition and norm by torch."""
    engine.decoder.gpus = TwinOfNorm()


def without_rope_kv(engine: Any) -> None:
    """Norms of heads, rotation and the KV write by torch."""
    engine.decoder.rope_kv_write = rope_kv_write_torch


def without_silu_mul(engine: Any) -> None:
    """SiLU * mul by torch, after the product."""
    SomeProducts.of(engine).has_silu_mul = False


def without_skinny_linear(engine: Any) -> None:
    """The library's products."""
    SomeProducts.of(engine).has_skinny = False


OBJECTS: dict[str, Callable[[Any], None]] = {
    "add-norm": without_add_norm,
    "rope-kv": without_rope_kv,
    "silu-mul": without_silu_mul,
    "skinny-linear": without_skinny_linear,
    "pdl": without_early_starts,
    "hopper": without_hopper,
}
"""What it can switch off in a new engine, by putting another object in the place of one."""


def check_against_m4(device: str) -> str:
    """Serve a small mixed load in fp32 with M4 and with M5 on this device; the tokens must agree.

    Half of the requests are greedy, half seeded; memory is short, so that some are preempted.

    Raises:
        RuntimeError: they do not; no speed is worth reporting then.
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
