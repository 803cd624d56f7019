"""M2's attention: which regions it reads, and that it leaves the model as it was."""

from __future__ import annotations

import pytest

import m2_batching
from engine_helpers import greedy, hf_generate, hf_greedy, make_engine, random_prompts, tiny_model
from m2_batching.attention import NAME as REGION_ATTENTION

SHORT, LONG = random_prompts([5, 18])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_decode_row_in_a_high_region_is_read_alone(family):
    """Regions 0..6 fall empty beside it: attention gathers one region instead of reading all."""
    model = tiny_model(family)
    engine = make_engine(m2_batching, model, max_num_seqs=8, trace="memory")
    prompts = [*random_prompts([3] * 7, seed=3), LONG]
    outputs = engine.generate(prompts, [greedy(2)] * 7 + [greedy(12)])
    last = engine.tracer.records[-1].batch
    assert [row.blocks for row in last] == [[7]]
    assert outputs[-1].token_ids == hf_greedy(family, LONG)


def test_the_model_is_hugging_faces_own_again_after_every_step():
    model = tiny_model("llama")
    engine = make_engine(m2_batching, model)
    engine.add_request(LONG, greedy(4))
    engine.step()
    assert model.config._attn_implementation != REGION_ATTENTION
    assert hf_generate(model, SHORT, 12, eos_token_id=199) == hf_greedy("llama", SHORT)
    engine.step()


def test_a_model_feature_that_is_not_supported_is_refused_by_name():
    with pytest.raises(ValueError, match="soft-capping"):
        m2_batching.LLMEngine(tiny_model("gemma3", attn_logit_softcapping=50.0))
