"""A server for clients' own libraries, with room for the prompts that agents write."""

from __future__ import annotations

import pytest

from helpers.servers import byte_tokenizer, serve
from milestone_llm.models.tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Start M4 with a tiny model, for which each byte is a token."""
    folder = tmp_path_factory.mktemp("clients") / "tiny-bytes"
    build_tiny_model("llama", max_position_embeddings=32768).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    log = folder.with_suffix(".log")
    options = "--max-num-seqs", "4", "--max-model-len", "32768", "--check-invariants"
    with serve("m4_prefix_chunked", folder, log, *options) as running:
        yield running


@pytest.fixture(autouse=True)
def asks_here(server, monkeypatch):
    """Let clients find the server and send nothing elsewhere."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
