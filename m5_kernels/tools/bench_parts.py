"""Parts of M5 that the bench switches off one by one, and the check that its tokens are M4's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import m4_prefix_chunked
from m5_kernels.decoder import decoder, parallel
from m5_kernels.engine import LLMEngine
from m5_kernels.kernels import linear as linear_file
from m5_kernels.kernels.rms_norm import add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from milestone_llm.lab.bench.workloads import random_tokens
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

FIELDS: dict[str, dict[str, Any]] = {
    "graphs": {"enforce_eager": True},  # without graphs there is no pipelining either
    "pipelining": {"async_scheduling": False},
    "prefix-cache": {"enable_prefix_caching": False},
    "chunks": {"enable_chunked_prefill": False},
    "eight-bits": {"quantization": None},
}
"""What `--without` can switch off by a field of the configuration."""
KERNELS: dict[str, list[tuple[Any, str, Any]]] = {
    "add-norm": [(parallel, "add_rms_norm", add_rms_norm_torch)],
    "rope-kv": [(decoder, "rope_kv_write", rope_kv_write_torch)],
    "silu-mul": [(linear_file, "silu_mul", silu_mul_torch)],
    "skinny-linear": [(decoder, "linear", linear_file.linear_torch)],  # the library's products
    # Programmatic dependent launch, and the products that need it.
    "pdl": [(place, "supports_pdl", lambda device: False) for place in (decoder, linear_file)],
}
"""What it can switch off in the decoder: names in modules, and what takes their places."""


@contextlib.contextmanager
def switched_off(names: Iterable[str], engine: object = None) -> Iterator[None]:
    """While it lasts, the decoder of every engine does without these kernels."""
    with contextlib.ExitStack() as stack:
        for name in names:
            for place in KERNELS[name]:
                stack.enter_context(patch.object(*place))
        yield


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
