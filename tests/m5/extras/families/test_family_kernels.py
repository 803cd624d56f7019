"""Kernels of other families against their twins, and decoders that launch them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.m5_models import hf_logits, logits_of_steps
from m5_kernels.extras.families.mlp import ACTIVATIONS, activate
from m5_kernels.extras.families.norms import (
    EXACT,
    LAYER,
    ROUNDED,
    FamilyNorm,
    NormWeight,
    add_norm,
    embed_norm,
)
from m5_kernels.extras.families.qk_norm import norm_queries_and_keys
from m5_kernels.kernels.launch import Launch
from milestone_llm.lab.families import build_small_model

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
TWINS, KERNELS = Launch(uses_twins=True), Launch()
SHAPES = pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 70), (5, 1000)], ids=str)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@SHAPES
@pytest.mark.parametrize("kind", [ROUNDED, EXACT, LAYER])
def test_norms(shape: tuple[int, int], kind: int, dtype: torch.dtype, device: str) -> None:
    num_tokens, size = shape

    def weight(kind: int = kind) -> NormWeight:
        bias = torch.randn(size, device=device) if kind == LAYER else None
        return NormWeight(kind, torch.randn(size, device=device), bias)

    part, residual = torch.randn(2, *shape, dtype=dtype, device=device)
    embedding, table = torch.randn(2, 50, size, dtype=dtype, device=device)
    ids, positions = torch.randint(50, (2, num_tokens), dtype=torch.int32, device=device)
    for norm in (
        FamilyNorm(weight(min(kind, EXACT)), weight(), 0.3),
        FamilyNorm(weight(min(kind, EXACT)), None),
        FamilyNorm(None, weight(), 12.0),
        FamilyNorm(None, weight(), is_parallel=True),
    ):
        sums = residual.clone(), residual.clone()
        found, expected = (
            add_norm(part, each, norm, 1e-5, launch)
            for each, launch in zip(sums, (KERNELS, TWINS), strict=True)
        )
        close(found, expected)
        close(*sums)
    for norm in (
        FamilyNorm(None, weight(), 3.0),
        FamilyNorm(None, None),
        FamilyNorm(None, weight(), 1.0, table),
    ):
        found_pair, expected_pair = (
            embed_norm(ids, positions, embedding, norm, 1e-5, launch) for launch in (KERNELS, TWINS)
        )
        for found, expected in zip(found_pair, expected_pair, strict=True):
            close(found, expected)


@DTYPES
@pytest.mark.parametrize(("q_size", "k_size"), [(48, 24), (70, 70), (16, 8)])
def test_queries_and_keys_are_normed_and_values_stay(
    q_size: int, k_size: int, dtype: torch.dtype, device: str
) -> None:
    q_norm, k_norm = torch.randn(q_size, device=device), torch.randn(k_size, device=device)
    qkv = torch.randn(5, q_size + 2 * k_size, dtype=dtype, device=device)
    own = qkv.clone(), qkv.clone()
    for each, launch in zip(own, (KERNELS, TWINS), strict=True):
        norm_queries_and_keys(each, q_norm, k_norm, 1e-5, launch)
    close(*own)
    assert torch.equal(own[0][:, q_size + k_size :], qkv[:, q_size + k_size :])


@DTYPES
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation", dict.fromkeys(ACTIVATIONS.values()))
def test_activations(activation: int, is_gated: bool, dtype: torch.dtype, device: str) -> None:
    alphas = torch.tensor([0.8, 1.3], device=device)
    for num_tokens, size in ((0, 8), (1, 1), (3, 1500)):
        neurons = torch.randn(num_tokens, size * (1 + is_gated), dtype=dtype, device=device) * 4
        neurons[:, :1] = 1e-4
        found, expected = (
            activate(neurons, activation, is_gated, alphas, launch) for launch in (KERNELS, TWINS)
        )
        close(found, expected)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3", "cohere2", "gpt2"])
@torch.inference_mode()
def test_logits_equal_hugging_face(family: str, device: str) -> None:
    sizes: dict[str, Any] = {"n_layer": 1}
    if family != "gpt2":
        layer_types = ["sliding_attention", "full_attention"]
        sizes = {"num_hidden_layers": 2, "layer_types": layer_types}
    model = build_small_model(family, **sizes)
    ids = torch.randint(4, 199, (2, 40))
    expected = hf_logits(model, ids)
    for seq, logits in enumerate(logits_of_steps(model, ids, device, is_int8=False)):
        torch.testing.assert_close(logits, expected[seq][: len(logits)], rtol=1e-3, atol=1e-3)
