"""Checkpoints in e4m3, as compressed-tensors, ModelOpt and Hugging Face write them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import m1_single
import m5_kernels
from helpers.engines import greedy, make_engine, random_prompts
from m5_kernels.extras.quantization.fp8_weight import E4M3, LARGEST
from milestone_llm.core.errors import InputError
from milestone_llm.models.tiny_models import build_tiny_model

on_plain_cpu = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("compressed_tensors") is not None,
    reason="Hugging Face's modules read more of them",
)

BLOCK = (48, 40)  # does not divide the sizes of the matrices
Files = tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]
"""Weights, config.json, and hf_quant_config.json."""


def compressed(strategy: str, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": None}
    if strategy == "block":
        weights["block_structure"] = list(BLOCK)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    head = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**head, "config_groups": groups, "ignore": ["lm_head"], **fields}


FINE_GRAINED = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
FORMS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # how large a part has a scale, its name, config.json, ModelOpt's own file
    "compressed-tensors, matrices": ("matrix", "weight_scale", compressed("tensor"), {}),
    "compressed-tensors, rows": ("row", "weight_scale", compressed("channel"), {}),
    "compressed-tensors, blocks": ("block", "weight_scale", compressed("block"), {}),
    "Hugging Face, blocks": ("block", "weight_scale_inv", FINE_GRAINED, {}),
    "AutoFP8, matrices": ("matrix", "weight_scale", {"quant_method": "fp8"}, {}),
    "ModelOpt": ("scalar", "weight_scale", {}, MODELOPT),
    "ModelOpt, config.json": (
        "scalar",
        "weight_scale",
        {"quant_method": "modelopt", **MODELOPT},
        {},
    ),
}


def rounded(matrix: torch.Tensor, part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a matrix in e4m3, its scales, and what the two stand for."""
    out_size, in_size = matrix.shape
    rows, columns = {"row": (1, in_size), "block": BLOCK}.get(part, (out_size, in_size))
    scales = torch.stack(
        [
            torch.stack([block.abs().amax() / LARGEST for block in band.split(columns, 1)])
            for band in matrix.split(rows)
        ]
    )
    wide = scales.repeat_interleave(rows, 0)[:out_size]
    wide = wide.repeat_interleave(columns, 1)[:, :in_size]
    values = (matrix / wide).to(E4M3)
    stored = scales.reshape({"matrix": (1,), "scalar": ()}.get(part, scales.shape))
    return values, stored.contiguous(), values.float() * wide


def write_checkpoint(
    folder: Path, form: str, change: Callable[[Files], object] = lambda files: None, **sizes: int
) -> Any:
    """Write a tiny checkpoint in a form. Returns the model that its weights stand for."""
    part, kind, config, modelopt = FORMS[form]
    model = build_tiny_model("qwen3", **sizes)
    model.save_pretrained(folder)
    weights, fields = load_file(folder / "model.safetensors"), copy.deepcopy(config)
    exact = model.state_dict()
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name], scales, stands_for = rounded(weights[name] * 1.1, part)
        weights[name.removesuffix("weight") + kind] = scales
        if part != "block":
            weights[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
        exact[name].copy_(stands_for)
    head = json.loads((folder / "config.json").read_text())
    files: Files = weights, fields, copy.deepcopy(modelopt)
    change(files)
    if fields:
        head["quantization_config"] = fields
    (folder / "config.json").write_text(json.dumps(head))
    if files[2]:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": files[2]}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return model


def loaded(model: Any, **fields: Any) -> Any:
    return make_engine(m5_kernels, model, device="cpu", max_model_len=64, **fields)


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_the_model_that_its_weights_stand_for(form, tmp_path, caplog):
    exact = write_checkpoint(tmp_path, form)
    ours = loaded(str(tmp_path), quantization="fp8", dtype="float32")
    expected = loaded(exact, quantization="fp8")
    for own, other in zip(ours.decoder.layers, expected.decoder.layers, strict=True):
        for weight, wanted in zip(own.linear_weights, other.linear_weights, strict=True):
            assert torch.equal(weight.weight.values.float(), wanted.weight.values.float())
            assert torch.equal(weight.weight.scale, wanted.weight.scale)
    prompts = random_prompts([9, 4], seed=4)
    outputs = [each.generate(prompts, greedy(8)) for each in (ours, expected)]
    assert [each.token_ids for each in outputs[0]] == [each.token_ids for each in outputs[1]]
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "rounded again" in told[0]


def test_one_scale_of_a_file_stays_and_with_it_every_bit(tmp_path):
    write_checkpoint(tmp_path, "ModelOpt")
    engine = loaded(str(tmp_path), quantization="fp8", dtype="bfloat16")
    weights = load_file(tmp_path / "model.safetensors")
    for index, layer in enumerate(engine.decoder.layers):
        name = f"model.layers.{index}.mlp.down_proj.weight"
        assert torch.equal(layer.mlp.down.values.float(), weights[name].float())
        assert float(layer.mlp.down.scale) == pytest.approx(float(weights[f"{name}_scale"]), 1e-5)


NAME = "model.layers.1.mlp.up_proj"
UNREAD: dict[str, tuple[str, Callable[[Files], object], str]] = {
    "NVFP4": ("ModelOpt", lambda files: files[2].update(quant_algo="NVFP4"), "modelopt NVFP4"),
    "e5m2": ("Hugging Face, blocks", lambda files: files[1].update(fmt="e5m2"), "fp8 e5m2"),
    "4 bits": (
        "compressed-tensors, rows",
        lambda files: files[1]["config_groups"]["group_0"]["weights"].update(num_bits=4),
        "float 4",
    ),
    "groups": (
        "compressed-tensors, rows",
        lambda files: files[1]["config_groups"]["group_0"]["weights"].update(strategy="group"),
        "compressed-tensors float 8",
    ),
    "sparse": (
        "compressed-tensors, rows",
        lambda files: files[1].update(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse-24-bitmask",
    ),
    "rotated": (
        "compressed-tensors, rows",
        lambda files: files[1].update(transform_config={"config_groups": {"u": {}}}),
        "compressed-tensors float 8",
    ),
    "AWQ": ("ModelOpt, config.json", lambda files: files[1].update(quant_method="awq"), "awq"),
    "no scale": (
        "compressed-tensors, matrices",
        lambda files: files[0].pop(f"{NAME}.weight_scale"),
        f"{NAME}.weight is in F8_E4M3 and has no scale",
    ),
    "no scale, other bits": (
        "ModelOpt",
        lambda files: files[0].update({"lm_head.weight": torch.ones(199, 64).to(torch.int8)}),
        "lm_head.weight is in I8 and has no scale",
    ),
    "a scale for nothing": (
        "Hugging Face, blocks",
        lambda files: files[0].update({f"{NAME}.weight": torch.zeros(128, 64)}),
        f"{NAME}.weight is in F32 and has a scale",
    ),
    "blocks of other sizes": (
        "Hugging Face, blocks",
        lambda files: files[1].update(weight_block_size=[64, 64]),
        "with scales",
    ),
    "scales in whole numbers": (
        "Hugging Face, blocks",
        lambda files: files[0].update(
            {f"{NAME}.weight_scale_inv": torch.ones(3, 2, dtype=torch.uint8)}
        ),
        f"{NAME}.weight_scale_inv is in torch.uint8",
    ),
    "two kinds of scales": (
        "compressed-tensors, rows",
        lambda files: files[0].update({f"{NAME}.weight_scale_inv": torch.ones(128, 1)}),
        f"two kinds of scales for {NAME}",
    ),
    "a block of one number": (
        "Hugging Face, blocks",
        lambda files: files[1].update(weight_block_size=48),
        "blocks of [48]",
    ),
    "a block of nothing": (
        "Hugging Face, blocks",
        lambda files: files[1].update(weight_block_size=[0, 40]),
        "blocks of [[0, 40]]",
    ),
    "the name of a scheme": (
        "compressed-tensors, rows",
        lambda files: files[1].update(config_groups={"FP8": ["Linear"]}),
        "compressed-tensors None None",
    ),
    "a zero point": (
        "compressed-tensors, rows",
        lambda files: files[0].update({f"{NAME}.weight_zero_point": torch.ones(128, 1)}),
        f"{NAME}.weight_zero_point",
    ),
}


@pytest.mark.parametrize("what", UNREAD)
def test_what_is_stored_in_another_way_is_refused_by_name(what, tmp_path):
    form, change, message = UNREAD[what]
    write_checkpoint(tmp_path, form, change)
    with pytest.raises(InputError) as error:
        loaded(str(tmp_path), quantization="fp8", dtype="float32")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_half_a_file_is_told_of_in_one_line(tmp_path):
    write_checkpoint(tmp_path, "ModelOpt")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match=r"^[^\n]*model.safetensors is damaged[^\n]*$"):
        loaded(str(tmp_path), quantization="fp8", dtype="float32")


@on_plain_cpu
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_without_fp8_it_is_refused_by_name(form, quantization, tmp_path):
    write_checkpoint(tmp_path, form)
    with pytest.raises(InputError, match=r"quant|weight_scale|cannot load the folder") as error:
        loaded(str(tmp_path), quantization=quantization, dtype="float32")
    assert "\n" not in str(error.value)


def test_scales_of_keys_and_values_are_passed_over_with_a_word(tmp_path, caplog):
    names = ("k_scale", "v_proj.v_scale", "k_proj.output_scale")
    scales = {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in names}
    write_checkpoint(tmp_path, "ModelOpt", lambda files: files[0].update(scales))
    loaded(str(tmp_path), quantization="fp8", dtype="float32")
    assert any("3 weights that the model does not read" in each.message for each in caplog.records)


def test_of_matrices_that_a_checkpoint_leaves_exact_a_word_is_said(tmp_path, caplog):
    def leave(files: Files) -> None:
        files[0].pop("model.layers.1.mlp.up_proj.weight_scale")
        files[0]["model.layers.1.mlp.up_proj.weight"] = torch.ones(128, 64)

    write_checkpoint(tmp_path, "compressed-tensors, rows", leave)
    loaded(str(tmp_path), quantization="fp8", dtype="float32")
    assert "of those that it has exactly, so many, too: 1" in caplog.text


def test_a_family_whose_files_have_transposed_weights_is_read(tmp_path):
    exact = build_tiny_model("gpt2")
    exact.save_pretrained(tmp_path)
    name = "transformer.h.0.mlp.c_fc"
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"{name}.weight"], weights[f"{name}.weight_scale"], stands_for = rounded(
        weights[f"{name}.weight"], "row"
    )
    exact.state_dict()[f"{name}.weight"].copy_(stands_for)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    head = json.loads((tmp_path / "config.json").read_text())
    head["quantization_config"] = compressed("channel")
    (tmp_path / "config.json").write_text(json.dumps(head))
    ours = loaded(str(tmp_path), quantization="fp8", dtype="float32").decoder.layers[0].mlp
    wanted = loaded(exact, quantization="fp8").decoder.layers[0].mlp
    assert torch.equal(ours.up.values.float(), wanted.up.values.float())


def test_blocks_of_no_known_size_are_hugging_faces(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "BLOCK", (128, 128))
    forget = lambda files: files[1].pop("weight_block_size")  # noqa: E731
    exact = write_checkpoint(tmp_path, "Hugging Face, blocks", forget, intermediate_size=192)
    ours = loaded(str(tmp_path), quantization="fp8", dtype="float32").decoder.layers[0].mlp
    wanted = loaded(exact, quantization="fp8").decoder.layers[0].mlp
    assert torch.equal(ours.gate_up.values.float(), wanted.gate_up.values.float())


@on_plain_cpu
@pytest.mark.parametrize("package", [m1_single, m5_kernels])
def test_blocks_that_end_within_a_matrix_are_not_cut_evenly(package, tmp_path, monkeypatch):
    """Hugging Face's modules multiply 128 rows by 2 scales as blocks of 64, not of 80 and 48."""
    monkeypatch.setitem(globals(), "BLOCK", (80, 64))
    size = {"weight_block_size": [80, 64]}
    write_checkpoint(tmp_path, "Hugging Face, blocks", lambda files: files[1].update(size))
    with pytest.raises(InputError, match=r"^[^\n]* 128 x 64, with scales for blocks of 80 x 64 "):
        make_engine(package, str(tmp_path), device="cpu", max_model_len=64)


@on_plain_cpu
def test_without_a_gpu_hugging_face_reads_blocks_that_divide_a_matrix(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "BLOCK", (16, 32))
    size = {"weight_block_size": [16, 32]}
    exact = write_checkpoint(tmp_path, "Hugging Face, blocks", lambda files: files[1].update(size))
    engines = loaded(str(tmp_path), dtype="float32"), loaded(exact)
    prompts = random_prompts([9, 4], seed=4)
    outputs = [[out.token_ids for out in each.generate(prompts, greedy(8))] for each in engines]
    assert outputs[0] == outputs[1]
