"""Weights in eight bits: one model, that of scale times integers, on every path."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPTQConfig

import m4_prefix_chunked
import m5_kernels
from helpers.engines import assert_empty, greedy, hf_generate, make_engine, random_prompts
from helpers.m5_models import rounded, with_biases
from m5_kernels.decoder.load import load_decoder, load_fused_decoder
from m5_kernels.decoder.ops import LESSON, DecoderOps
from m5_kernels.extras.quantization.hopper_int8_tiles import (
    COPY_REGISTERS,
    H200_INT8,
    HopperInt8Tile,
    hopper_int8_tile,
)
from m5_kernels.extras.quantization.int8_method import Int8Linear
from m5_kernels.extras.quantization.int8_weight import NUM_ARRIVALS, Int8Weight
from milestone_llm.core.errors import InputError
from milestone_llm.lab.families import build_small_model
from milestone_llm.models.hub_files import safetensors_files
from milestone_llm.models.tiny_models import build_tiny_model


def int8_engine(model: Any, **fields: Any) -> Any:
    fields = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 24, **fields}
    return make_engine(m5_kernels, model, quantization="int8", **fields)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# --- rounding ---------------------------------------------------------------------------------


def test_each_weight_goes_to_the_nearest_step_of_its_row() -> None:
    matrix = torch.randn(9000, 70)
    matrix[3] = 0
    matrix[4, 5] = 1e4
    weight = Int8Weight.zeros(9000, 70, "cpu")
    weight.round_from(matrix)
    assert weight.scale[3] == 1
    assert not weight.integers[3].any()
    largest = matrix.abs().amax(1)
    assert torch.equal(weight.integers.abs().amax(1)[largest > 0], torch.full((8999,), 127).char())
    error = (weight.integers * weight.scale[:, None] - matrix).abs().amax(1)
    assert (error <= largest / 127 / 2 * 1.001).all()


def test_a_part_of_a_row_has_the_scale_of_the_whole() -> None:
    matrix = torch.randn(20, 130) * torch.logspace(0, 2, 130)
    whole, left, right = (Int8Weight.zeros(20, size, "cpu") for size in (130, 65, 65))
    whole.round_from(matrix)
    left.round_from(matrix, slice(0, 65))
    right.round_from(matrix, slice(65, 130))
    assert torch.equal(torch.cat((left.integers, right.integers), 1), whole.integers)
    assert torch.equal(left.scale, whole.scale)
    for part, rows in zip(whole.split([7, 13]), (slice(7), slice(7, None)), strict=True):
        assert torch.equal(part.integers, whole[rows].integers)


# --- the decoder ------------------------------------------------------------------------------


def test_matrices_take_a_byte_a_weight_and_a_tied_embedding_stays() -> None:
    model = build_tiny_model("qwen3", tie_word_embeddings=True).bfloat16()
    plain, decoder = (
        load_fused_decoder(model, model, 64, torch.device("cpu"), ops)
        for ops in (DecoderOps(), DecoderOps(linear=Int8Linear()))
    )
    of_layers = plain.layers[0].linear_weights, decoder.layers[0].linear_weights
    for (matrix, _), (weight, _) in zip(*of_layers, strict=True):
        assert 2 * weight.words.nbytes == matrix.nbytes
    assert torch.equal(decoder.embedding, model.get_input_embeddings().weight)
    assert 2 * decoder.lm_head.words.nbytes == decoder.embedding.nbytes


# --- engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("qwen3", {"kv_cache_tokens": 64, "preemption": "swap", "async_scheduling": True}),
    ],
)
def test_tokens_are_those_of_the_rounded_model(family: str, fields: dict[str, Any]) -> None:
    model = with_biases(family).double()
    reference = rounded(model)
    prompts = random_prompts([5, 30, 9, 30], seed=4)
    expected = [hf_generate(reference, prompt, 8, eos_token_id=999) for prompt in prompts]
    engine = int8_engine(model, **fields)
    for _ in range(2):  # the second time by what the prefix cache has
        assert tokens(engine.generate(prompts, greedy(8))) == expected
    if "kv_cache_tokens" in fields:
        assert engine.stats()["preemptions"] > 0
    else:
        assert engine.stats()["prefix_cache"]["hits"] > 0
    assert_empty(engine)


def test_a_folder_is_read_matrix_by_matrix(tmp_path: Any) -> None:
    model = with_biases("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    engine = int8_engine(str(tmp_path), dtype="float32")
    assert not any(parameter.numel() for parameter in engine.model.parameters())
    prompts = random_prompts([5, 12])
    assert tokens(engine.generate(prompts, greedy(8))) == tokens(
        int8_engine(model).generate(prompts, greedy(8))
    )


@pytest.mark.parametrize("is_in_shards", [False, True])
def test_of_a_folder_those_files_are_read_that_hugging_face_reads(
    is_in_shards: bool, tmp_path: Any
) -> None:
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB" if is_in_shards else "1GB")
    other = build_tiny_model("llama", seed=1).state_dict()
    save_file(other, tmp_path / "zz_old.safetensors")
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(3)}, tmp_path / "consolidated.safetensors"
    )
    if not is_in_shards:  # an index of files that were merged
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    prompts = random_prompts([5, 12])
    expected = tokens(int8_engine(model).generate(prompts, greedy(8)))
    assert tokens(int8_engine(str(tmp_path), dtype="float32").generate(prompts, greedy(8))) == (
        expected
    )


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "neither model.safetensors nor model.safetensors.index.json"),
        ("{", "index.json is damaged"),
        ('{"metadata": {}}', "index.json is damaged"),
        ('{"weight_map": {"lm_head.weight": "../other/a.safetensors"}}', "index.json is damaged"),
        ('{"weight_map": {"lm_head.weight": "a.safetensors"}}', "lacks the file a.safetensors"),
    ],
)
def test_without_the_files_that_the_index_names_a_folder_is_refused(
    index: str | None, message: str, tmp_path: Any
) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "zz_old.safetensors")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=message):
        int8_engine(str(tmp_path))


def test_of_a_repository_only_the_files_that_the_index_names_are_fetched(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "consolidated.safetensors").touch()
    fetched = []

    def fetch(source: str, name: str, **options: Any) -> str | None:
        fetched.append(name)
        return str(tmp_path / name) if (tmp_path / name).exists() else None

    monkeypatch.setattr("milestone_llm.models.hub_files.cached_file", fetch)
    files = safetensors_files("somebody/some-model")
    assert [file.name for file in files] == sorted(path.name for path in tmp_path.glob("model-*"))
    index = "model.safetensors.index.json"
    assert fetched == ["model.safetensors", index, *(file.name for file in files)]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_on_a_gpu_tokens_are_those_of_the_rounded_model(family: str) -> None:
    """In float32, in graphs, kernel by kernel, and where requests are preempted."""
    model = with_biases(family)
    prompts = random_prompts([5, 30, 9, 17, 30], seed=4)
    expected = tokens(
        make_engine(m4_prefix_chunked, rounded(model).cuda()).generate(prompts, greedy(12))
    )
    for fields in ({}, {"kv_cache_tokens": 64}, {"enforce_eager": True}):
        engine = int8_engine(model.cuda(), **fields)
        assert tokens(engine.generate(prompts, greedy(12))) == expected


# --- refusals ---------------------------------------------------------------------------------


def test_a_config_that_makes_no_model_is_refused(tmp_path: Any) -> None:
    model = build_tiny_model("llama")
    model.config.num_key_value_heads = -1
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="config makes no model"):
        int8_engine(str(tmp_path))


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r'quantization="int8": no fused decoder for .cohere'):
        m5_kernels.LLMEngine(build_small_model("cohere"), quantization="int8")
    model = build_tiny_model("llama")
    for fields in ({"quant_method": "gptq", "bits": 4}, GPTQConfig(bits=4)):
        model.config.quantization_config = fields
        with pytest.raises(ValueError, match=r'quantization="int8": .* quantized by .gptq. '):
            m5_kernels.LLMEngine(model, quantization="int8")
        with pytest.raises(ValueError, match=r"quantized by .gptq. "):  # as when GPUs share it
            load_decoder(model, model, 64, torch.device("cpu"), LESSON, is_whole=False)
    with pytest.raises(ValueError, match=r"quantization must be .*, got 'int4'"):
        m5_kernels.LLMEngine("tiny-llama", quantization="int4")


# --- tiles for Hopper -------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3, 17, 33, 65, 129, 256, 1024, 8192])
def test_the_tile_for_hopper_gives_multiprocessors_something_to_do(num_tokens: int) -> None:
    for size, in_size, is_gated in itertools.product(
        [1024, 4096, 24576, 151936], [64, 1024, 4096, 12288, 28672], [False, True]
    ):
        tile = hopper_int8_tile(num_tokens, size, in_size, is_gated)
        num_down, num_across = tile.grid(num_tokens, size, is_gated)
        num_tiles = num_down * num_across
        assert num_tiles * tile.num_parts >= 44 or in_size <= 1024 or size <= 1024
        assert tile.num_parts == 1 or tile.side_by_side * num_tiles <= NUM_ARRIVALS
        assert tile.num_parts == 1 or in_size >= tile.num_parts * tile.depth
        assert tile.rows < 2 * num_tokens or tile.rows == 16


@pytest.mark.parametrize("tile", H200_INT8, ids=str)
def test_tiles_for_hopper_fit(tile: HopperInt8Tile) -> None:
    """Shared memory and registers of as many programs as a multiprocessor shall have."""
    outputs, warpgroups = 64 * tile.side_by_side, tile.side_by_side * tile.turns
    ring = tile.num_stages * (2 * tile.rows + outputs) * tile.depth
    sums = (2 + 4 * (tile.turns - 1)) * outputs * tile.wide
    assert ring + sums + 1500 < 227 * 1024
    assert tile.turns == 1 or (tile.side_by_side == 1 and tile.num_stages % tile.turns == 0)
    mean, multiplying = tile.registers
    assert 128 * (warpgroups + 1) * mean <= 65536
    assert warpgroups * multiplying + COPY_REGISTERS <= (warpgroups + 1) * mean
