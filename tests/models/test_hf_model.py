"""The user's model while engines serve it: it stays Hugging Face's own, whenever one looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.engines import PACKAGES, greedy, hf_generate, make_engine, random_prompts
from helpers.interrupter import Interrupter
from milestone_llm.models.hf_model import with_attention
from milestone_llm.models.tiny_models import build_tiny_model

PROMPTS = random_prompts([9, 5])
RUNNERS = ("runner.py", "hf_model.py", "flat_probe.py", "support.py")


def own_tokens(model: Any) -> list[int]:
    """What `generate` makes of a prompt, past EOS."""
    return hf_generate(model, PROMPTS[0], 3, eos_token_id=model.config.vocab_size)


@pytest.mark.parametrize("package", PACKAGES[:4], ids=lambda package: package.__name__)
def test_the_model_is_hugging_faces_own_at_every_line_of_a_try_and_of_a_step(package):
    model = build_tiny_model("mistral").double()
    own = model.config._attn_implementation
    seen = set()

    def look() -> None:
        seen.add(model.config._attn_implementation)

    with Interrupter(-1, (*RUNNERS, "attention.py"), look) as watching:
        engine = make_engine(package, model, max_num_seqs=2, max_model_len=32)
        engine.generate(PROMPTS, greedy(2))
    assert watching.num_lines > 100
    assert seen == {own}


def test_generate_works_in_the_middle_of_a_step_and_so_does_another_engine():
    model = build_tiny_model("llama").double()
    engines = [make_engine(package, model, max_model_len=64) for package in PACKAGES[1:3]]
    expected = [output.token_ids for output in engines[0].generate(PROMPTS, greedy(4))]
    own, found = own_tokens(model), []

    def in_the_middle(*_: Any) -> None:
        hook.remove()
        found.append(own_tokens(model))
        found.extend(output.token_ids for output in engines[1].generate(PROMPTS, greedy(4)))

    hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(in_the_middle)
    outputs = engines[0].generate(PROMPTS, greedy(4))
    assert found == [own, *expected]
    assert [output.token_ids for output in outputs] == expected


def test_weights_hooks_and_leaves_are_shared():
    model = build_tiny_model("gemma3")
    twin = with_attention(model, "region_attention")
    assert {id(tensor) for tensor in model.state_dict(keep_vars=True).values()} == {
        id(tensor) for tensor in twin.state_dict(keep_vars=True).values()
    }
    assert {id(buffer) for buffer in model.buffers()} == {id(buffer) for buffer in twin.buffers()}
    assert twin.lm_head is model.lm_head
    calls = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    twin.model.layers[0].mlp(torch.zeros(1, 1, 64))
    assert calls == [1]
    assert twin.model.layers[0].self_attn.config is twin.config is not model.config
