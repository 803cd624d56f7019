"""The programs behind the pages do what the pages say of them."""

import importlib.util
import sys
from pathlib import Path

import torch

from milestone_llm.models.checkpoint import load_model

QUESTIONS = Path(__file__).parents[2] / "docs" / "questions"


def program(name):
    """A file of docs/questions as a module."""
    spec = importlib.util.spec_from_file_location(name, QUESTIONS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@torch.inference_mode()
def test_the_layer_of_m0_gives_hugging_faces_logits_with_and_without_its_cache():
    model = load_model("tiny-llama", dtype="float32", device="cpu").model
    ours, token_ids = program("m0_transformer").Model(model), [5, 9, 33, 7, 120]
    theirs = model(torch.tensor([token_ids])).logits[0, -1]
    whole, _ = ours.forward(token_ids, None)
    _, caches = ours.forward(token_ids[:3], None)
    in_parts, _ = ours.forward(token_ids[3:], caches)
    torch.testing.assert_close(whole, theirs)
    torch.testing.assert_close(in_parts, theirs)


@torch.inference_mode()
def test_a_key_that_is_turned_by_its_position_gives_a_score_that_depends_on_the_distance():
    rotate = program("m0_transformer").rotate
    query, key = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0)).unbind()
    near, far = (rotate(query, at + 3, 1e4) * rotate(key, at, 1e4) for at in (0, 500))
    torch.testing.assert_close(near.sum(), far.sum(), rtol=1e-3, atol=1e-3)
