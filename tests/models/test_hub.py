"""What the hub refuses, with what its user can do. A stand-in answers on this machine."""

from __future__ import annotations

import http.server
import json
import re
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

import m1_single
import m5_kernels
from helpers.engines import greedy
from milestone_llm.core.errors import InputError
from milestone_llm.models.checkpoint import at_revision, load_model
from milestone_llm.models.tiny_models import build_tiny_model

ERRORS = {
    "org/gated": (401, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers with the status and the code that the hub has for a repository."""

    asked: list[str]

    def do_GET(self):
        name = "/".join(self.path.split("/")[1:3])
        self.asked.append(self.path)
        status, code = ERRORS.get(name, (200 if self.path == "/" else 404, "EntryNotFound"))
        if "resolve/other/" in self.path:
            status, code = 404, "RevisionNotFound"
        if "Bearer" in self.headers.get("authorization", "") and status == 401:
            status = 403 if code == "GatedRepo" else 404
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield address
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("org/gated", None, "accept its terms at {hub}/org/gated, then log in .*HF_TOKEN"),
        ("org/gated", "hf_x", "your token has no access: ask at {hub}/org/gated"),
        ("org/private", None, "private: then log in with `hf auth login`"),
        ("org/private", "hf_x", "private and your token has no access"),
        ("org/open@other", None, "no branch, tag or commit 'other'"),
    ],
)
def test_a_refusal_says_what_to_do(hub, monkeypatch, name, token, words):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(InputError) as caught:
        load_model(name, device="cpu")
    assert re.search(words.format(hub=hub), str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_a_revision_is_asked_for_and_needs_a_repository(hub, tmp_path):
    with pytest.raises(InputError):
        m1_single.LLMEngine("org/open", revision="other", device="cpu")
    assert any(path.startswith("/org/open/resolve/other/") for path in Hub.asked)
    for model in (build_tiny_model("llama"), str(tmp_path), "tiny-llama", "org/open@main"):
        with pytest.raises(InputError, match="revision='other' is for an id of the hub"):
            at_revision(model, "other")


def folder_with(tmp_path: Path, **config: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_code_of_a_repository_is_never_run_and_the_message_says_so(tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    with pytest.raises(InputError, match="never happens here: there is no option"):
        load_model(folder_with(tmp_path, model_type="own", auto_map=code), device="cpu")


@pytest.mark.parametrize(
    ("name", "words"), [("llava", "takes images or sound"), ("t5", "no causal language model")]
)
def test_a_model_of_another_kind_is_refused_by_its_type(tmp_path, name, words):
    with pytest.raises(InputError, match=f"is of type '{name}', which .*{words}"):
        load_model(folder_with(tmp_path, model_type=name), device="cpu")


def test_a_cached_model_without_tokenizer_is_served_by_ids(tmp_path, monkeypatch, caplog):
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--plain" / "snapshots" / "0"
    build_tiny_model("llama").save_pretrained(snapshot)
    (cache / "models--org--plain" / "refs").mkdir()
    (cache / "models--org--plain" / "refs" / "main").write_text("0")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    engine = m1_single.LLMEngine("org/plain", device="cpu")
    assert engine.generate([[5, 6]], greedy(3))[0].finished
    assert engine.tokenizer is None
    assert "org/plain has no tokenizer" in caplog.text


def test_a_gguf_file_of_the_hub_is_named_by_its_type_or_its_name(tmp_path, monkeypatch):
    from milestone_llm.models.hub_files import find_gguf_file

    cache = tmp_path / "hub"
    snapshot = cache / "models--org--tiny-GGUF" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    names = "tiny-Q8_0.gguf", "tiny-Q4_K_M-00001-of-00002.gguf", "tiny-Q4_K_M-00002-of-00002.gguf"
    for name in names:
        (snapshot / name).touch()
    (cache / "models--org--tiny-GGUF" / "refs").mkdir()
    (cache / "models--org--tiny-GGUF" / "refs" / "main").write_text("0")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, file in (("org/tiny-GGUF:Q4_K_M", names[1]), (f"org/tiny-GGUF/{names[0]}", names[0])):
        found = find_gguf_file(name)
        assert found is not None
        assert found.name == file
    assert find_gguf_file("org/tiny-GGUF") is None
    with pytest.raises(InputError, match="name one by its type, org/tiny-GGUF:Q4_K_M"):
        load_model("org/tiny-GGUF", device="cpu")
    with pytest.raises(InputError, match=r"has no file \*Q2_K.gguf"):
        load_model("org/tiny-GGUF:Q2_K", device="cpu")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_too_large_for_the_host_is_read_part_by_part(tmp_path, monkeypatch, family):
    """On a GPU; here the GPU is a CPU."""
    build_tiny_model(family).save_pretrained(tmp_path)
    prompts = [[5, 6, 7], [9] * 20]
    options = {"device": "cpu", "max_model_len": 64}
    expected = m5_kernels.LLMEngine(str(tmp_path), **options).generate(prompts, greedy(6))
    monkeypatch.setattr("m5_kernels.engine.is_read_in_parts", lambda *_: True)
    monkeypatch.setattr("m5_kernels.engine.check_flat", None)  # it wants whole weights
    monkeypatch.setattr("m5_kernels.decoder.load.has_bar", lambda files: True)
    outputs = m5_kernels.LLMEngine(str(tmp_path), **options).generate(prompts, greedy(6))
    assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]


def test_which_models_are_too_large_for_the_host(tmp_path, monkeypatch):
    from milestone_llm.models import checkpoint, machine

    build_tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(checkpoint.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checkpoint.torch.cuda, "device_count", lambda: 1)
    for memory, device, wanted in ((10**9, "cuda", False), (9, "cuda", True), (9, "cpu", False)):
        monkeypatch.setattr(machine, "host_memory", lambda memory=memory: memory)
        assert checkpoint.is_read_in_parts(str(tmp_path), None, device) is wanted
        assert not checkpoint.is_read_in_parts("tiny-llama", None, device)
