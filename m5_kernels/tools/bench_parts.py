"""What the bench runs: M5 with parts off, and M5 compared with M4."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import m4_prefix_chunked
from m5_kernels import decoder
from m5_kernels.engine import LLMEngine
from m5_kernels.kernels import rope_kv_write as rope_file
from m5_kernels.kernels.rms_norm import add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import write_kv_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch
from m5_kernels.kernels.skinny_linear import skinny_linear_torch
from milestone_llm.lab.bench.workloads import random_tokens
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

FIELDS: dict[str, dict[str, Any]] = {
    "graphs": {"enforce_eager": True},  # without graphs there is no pipelining either
    "pipelining": {"async_scheduling": False},
    "prefix-cache": {"enable_prefix_caching": False},
    "chunks": {"enable_chunked_prefill": False},
}
"""What `--without` can switch off by a field of the configuration."""
KERNELS = ("add-norm", "rope-kv", "silu-mul", "skinny-linear", "pdl")
"""The parts of the decoder that it can switch off: kernels, for PyTorch's own; early start."""


@contextlib.contextmanager
def switched_off(names: set[str]) -> Iterator[None]:
    """While it lasts, M5's decoder does without these parts: PyTorch's kernels take their place."""
    twins: dict[str, Any] = {
        "add-norm": ("add_rms_norm", add_rms_norm_torch),
        "rope-kv": ("rope_kv_write", rope_file.rope_kv_write_torch),
        "silu-mul": ("silu_mul", silu_mul_torch),
        "skinny-linear": ("skinny_linear", skinny_linear_torch),
        "pdl": ("supports_pdl", lambda device: False),
    }
    with contextlib.ExitStack() as stack:
        for name in names & twins.keys():
            stack.enter_context(patch.object(decoder, *twins[name]))
        if "rope-kv" in names:
            stack.enter_context(patch.object(rope_file, "write_kv_torch", _write_kv))
        yield


def _write_kv(key: torch.Tensor, *others: torch.Tensor) -> None:
    """On a GPU the twin waits for the host, which no graph can; the kernel does not."""
    (rope_file.write_kv if key.is_cuda else write_kv_torch)(key, *others)


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
    limits: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 96, "max_num_batched_tokens": 48}
    limits |= {"kv_cache_tokens": 192}
    alone = m4_prefix_chunked.LLMEngine(model, **{**limits, "max_num_seqs": 1})
    expected = [output.token_ids for output in alone.generate(prompts, params)]
    for name, kind, fields in (
        ("M4", m4_prefix_chunked.LLMEngine, {}),
        ("M5", LLMEngine, {}),
        ("M5, eager", LLMEngine, {"enforce_eager": True}),
    ):
        outputs = kind(model, **limits, **fields).generate(prompts, params)
        if [output.token_ids for output in outputs] != expected:
            raise RuntimeError(f"{name} does not give the tokens of M4 with one request at a time")
    return (
        f"{len(items)} requests (fp32, tiny-qwen3, half of them sampled): M4 alone and batched, "
        "M5 pipelined and eager give the same tokens"
    )
