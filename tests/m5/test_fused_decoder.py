"""The fused decoder against Hugging Face's modules: logits, paged cache, steps of every kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from helpers.m5_models import fused, hf_logits, logits_of_steps, rounded, with_biases
from m5_kernels import LLMEngine, SamplingParams
from m5_kernels import device_step as device_step_file
from m5_kernels import sampler as sampler_file
from m5_kernels.backends import Backend
from m5_kernels.decoder.attention import Attention
from m5_kernels.decoder.config import DecoderConfig, rope_tables
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.load import load_fused_decoder
from m5_kernels.decoder.ops import DecoderOps
from m5_kernels.decoder.weights import read_safetensors
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import supports_pdl
from m5_kernels.kernels.triton_or_twin import tl, triton
from m5_kernels.tools.measure import relative_error
from milestone_llm.core.errors import InputError
from milestone_llm.models.hub_files import safetensors_files
from milestone_llm.models.tiny_models import build_tiny_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-some-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
}

WIDE: tuple[str, dict[str, Any]] = (
    "qwen3",
    {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "initializer_range": 0.02,
    },
)
"""Two layers of Qwen3-0.6B's shape."""


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_hugging_face_in_prefill_chunks_decode_and_mixed_steps(
    variant: str, is_int8: bool, device: str
) -> None:
    """In eight bits: those of scale times integers."""
    family, overrides = VARIANTS[variant]
    model = build_tiny_model(family, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # zeros and ones would hide a missing one
            parameter.copy_(torch.randn_like(parameter) * 0.1 + 0.5)
    ids = torch.randint(3, 199, (2, 40))
    plain, expected = hf_logits(model, ids), hf_logits(rounded(model) if is_int8 else model, ids)
    for seq, logits in enumerate(logits_of_steps(model, ids, device, is_int8)):
        wanted = expected[seq][: len(logits)]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        is_changed = relative_error(plain[seq][: len(logits)], wanted) > 1e-3  # by rounding
        assert is_changed == is_int8


@DEVICES
@pytest.mark.parametrize(
    ("variant", "is_int8"),
    [("llama-biases", False), ("qwen3", False), ("qwen3", True), ("wide", False)],
)
@torch.inference_mode()
def test_in_bf16_logits_are_as_near_the_exact_ones_as_those_of_hugging_face(
    variant: str, is_int8: bool, device: str
) -> None:
    family, overrides = {**VARIANTS, "wide": WIDE}[variant]
    model = with_biases(family, **overrides).bfloat16()
    reference = copy.deepcopy(model).float()
    if is_int8:
        reference = rounded(reference)
    ids = torch.randint(3, 199, (2, 40))
    exact, theirs = hf_logits(reference, ids), hf_logits(reference.bfloat16().to(device), ids).cpu()
    for seq, logits in enumerate(logits_of_steps(model, ids, device, is_int8)):
        wanted = exact[seq][: len(logits)]
        allowed = 1.5 * relative_error(theirs[seq][: len(logits)], wanted)
        assert relative_error(logits, wanted) < allowed


@triton.jit
def _delay_kernel(nanoseconds):
    """Let the next kernel start, wait, and only then be slow: nobody's results are there yet."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()


def delayed(launcher: Any) -> Any:
    """What launches a slow kernel before it launches its own."""

    def launch(*args: Any, **options: Any) -> Any:
        _delay_kernel[(1,)](20_000, num_warps=1, launch_pdl=True)
        return launcher(*args, **options)

    return launch


def with_delays(chosen: Backend) -> Backend:
    """A slow kernel before each launch of a layer that is no product."""
    ops = chosen.ops
    names = ("embed_norm", "rope_kv_write", "add_norm")
    return replace(
        chosen, ops=replace(ops, **{each: delayed(getattr(ops, each)) for each in names})
    )


@contextmanager
def delays(*places: tuple[Any, str]) -> Iterator[None]:
    """While it lasts, a slow kernel comes before these launchers'."""
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(patch.object(module, name, delayed(getattr(module, name))))
        yield


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_at_once", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (8, torch.bfloat16)]
)
def test_kernels_that_start_early_give_the_same_tokens(
    num_at_once: int, dtype: torch.dtype
) -> None:
    """With a slow kernel before each, the next two start long before the first has written."""
    model = build_tiny_model(WIDE[0], **WIDE[1]).to(dtype).cuda()
    prompts = [[(7 * i + j) % 199 for j in range(5 + 9 * i)] for i in range(8)]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=120, ignore_eos=True)

    def tokens(**options: Any) -> list[list[int]]:
        engine = LLMEngine(model, max_num_seqs=num_at_once, max_model_len=256, **options)
        return [output.token_ids for output in engine.generate(prompts, params)]

    early = tokens()
    with patch.object(Launch, "on", lambda device: PLAIN):
        assert tokens() == early
    if supports_pdl(torch.device("cuda")):
        with delays(
            *((FewRowsLinear, name) for name in ("apply", "gate_up")),
            (Attention, "__call__"),
            *((device_step_file, "append_sampled"), (sampler_file, "sample")),
        ):
            assert tokens(adapt_backend=with_delays) == early


def decoder_of(folder: Path) -> FusedDecoder:
    config = AutoConfig.from_pretrained(folder)
    decoder = FusedDecoder(DecoderConfig.from_hf(config), rope_tables(config), torch.float32, "cpu")
    decoder.load(read_safetensors(safetensors_files(str(folder))))
    return decoder


def test_folder_of_shards_gives_the_same_weights(tmp_path) -> None:
    model = build_tiny_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    second = decoder_of(tmp_path)
    first = fused(model, max_positions=second.max_positions)
    for name, own in first.slices().items():
        assert torch.equal(own.target, second.slices()[name].target), name
    assert torch.equal(first.cos_sin, second.cos_sin)


def test_a_model_has_the_head_that_it_has_whatever_its_config_says() -> None:
    other = build_tiny_model("llama")
    other.config.tie_word_embeddings = True
    decoder = fused(other)
    assert torch.equal(decoder.lm_head, other.lm_head.weight)
    assert not torch.equal(decoder.lm_head, decoder.embedding)
    tied = build_tiny_model("llama")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    decoder = fused(tied)
    assert decoder.lm_head is decoder.embedding


def test_a_head_that_is_tied_may_be_in_a_checkpoint_and_another_may_not(tmp_path) -> None:
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding"):
        decoder_of(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    decoder = decoder_of(tmp_path)
    assert decoder.lm_head is decoder.embedding
    embedding = weights.pop("model.embed_tokens.weight")  # the head alone, as in Hugging Face
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(decoder_of(tmp_path).embedding, embedding)
    weights["lm_head.weight"] = embedding[:-1].clone()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape"):
        decoder_of(tmp_path)


def test_a_consumed_model_gives_its_memory_back() -> None:
    model = build_tiny_model("llama")
    decoder = load_fused_decoder("its name", model, 64, torch.device("cpu"), DecoderOps())
    assert not any(parameter.numel() for parameter in model.parameters())
    assert decoder.embedding.isfinite().all()


@pytest.mark.parametrize(
    ("family", "overrides", "named"),
    [
        ("cohere", {}, "cohere"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "soft-capping of logits"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_unknown_features_are_refused_by_name(family: str, overrides: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DecoderConfig.from_hf(AutoConfig.for_model(family, **overrides))


@pytest.mark.parametrize(
    "fields", [{"rope_theta": 0}, {"rope_theta": -1e4}, {"rope_type": "linear", "factor": 0.0}]
)
def test_a_rope_whose_angles_are_no_numbers_is_refused(fields: dict[str, Any]) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, **fields}
    config = AutoConfig.for_model("llama", rope_parameters=parameters)
    with pytest.raises(InputError, match="angles that are no numbers"):
        rope_tables(config, 8)


def test_missing_and_unknown_weights_are_named() -> None:
    model = build_tiny_model("llama")
    decoder = fused(model)
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"no use for the weight model\.extra"):
        decoder.load([("model.extra", torch.ones(1))])
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        decoder.load(weights.items())
