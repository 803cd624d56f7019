"""Models of real size with random weights."""

from __future__ import annotations

import pytest
import torch

from milestone_llm.models import machine, shapes
from milestone_llm.models.checkpoint import load_model
from milestone_llm.models.pretrained import has_weights


def test_an_unknown_shape_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'random-gpt5'; there are random-qwen3-0\.6b, random-"):
        load_model("random-gpt5", device="cpu")


def test_a_model_larger_than_memory_is_refused_with_both_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "host_memory", lambda: 2**30)
    shapes.shape_config("qwen3-0.6b").save_pretrained(tmp_path)
    for name in ("random-qwen3-0.6b", tmp_path):
        with pytest.raises(ValueError, match=r"float32 takes 2.2 GiB, and this machine has 1.0 "):
            load_model(name, device="cpu")


def test_without_weights_there_are_config_and_modules(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"small": shapes._qwen3(64, 128, 2, 4)})
    empty = load_model("random-small", dtype="bfloat16", device="cpu", weights=False).model
    whole = load_model("random-small", dtype="bfloat16", device="cpu").model
    assert not has_weights(empty)
    assert has_weights(whole)
    assert empty.dtype == whole.dtype == torch.bfloat16
    assert empty.config.to_dict() == whole.config.to_dict()
    names = [name for name, _ in empty.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
