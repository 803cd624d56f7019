"""Selective batching gives the very tokens of `generate`, in flat batches and reused regions."""

from __future__ import annotations

import pytest

import m2_batching
from engine_helpers import (
    greedy,
    hf_generate,
    hf_generate_once,
    hf_greedy,
    make_engine,
    random_prompts,
    tiny_model,
)
from m1_single import SamplingParams
from m2_batching.attention import NAME as REGION_ATTENTION
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.models.tiny_models import TINY_FAMILIES

SLIDING_WINDOW = 24  # of tiny mistral and gemma3
PROMPTS = random_prompts([1, SLIDING_WINDOW + 17, 5, SLIDING_WINDOW, 2, SLIDING_WINDOW - 6])
LENGTHS = [12, 5, 1, 9, 8, 9]  # 18 + 9 grows out of the window while decoding


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(3, 48), (8, 2048)])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_flat_batches_give_the_tokens_of_generate(family, max_num_seqs, max_num_batched_tokens):
    engine = make_engine(
        m2_batching,
        tiny_model(family),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=96,
    )
    outputs = engine.generate(PROMPTS, [greedy(length) for length in LENGTHS])
    expected = [hf_greedy(family, *work) for work in zip(PROMPTS, LENGTHS, strict=True)]
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_reused_region_shows_nothing_of_its_last_owner(family):
    """The first owner leaves 41 + 5 tokens in the region, its successors see only their own."""
    engine = make_engine(m2_batching, tiny_model(family), max_num_seqs=1, max_model_len=64)
    for prompt, length in [(PROMPTS[1], 5), (PROMPTS[0], 12), (PROMPTS[5], 9)]:
        (output,) = engine.generate(prompt, greedy(length))
        assert output.token_ids == hf_greedy(family, prompt, length)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_decode_row_in_a_high_region_is_read_alone(family):
    """Regions 0..6 fall empty beside it: attention gathers one region instead of reading all."""
    model = tiny_model(family)
    engine = make_engine(m2_batching, model, max_num_seqs=8, trace="memory")
    prompts = [*random_prompts([3] * 7, seed=3), PROMPTS[5]]
    outputs = engine.generate(prompts, [greedy(2)] * 7 + [greedy(12)])
    last = engine.tracer.records[-1].batch
    assert [row.blocks for row in last] == [[7]]
    assert outputs[-1].token_ids == hf_greedy(family, PROMPTS[5])


def test_eos_ends_a_row_where_generate_ends_and_stays_in_the_output():
    eos = hf_greedy("llama", PROMPTS[1])[6]
    model = tiny_model("llama", eos_token_id=eos)  # the same weights
    expected = hf_generate(model, PROMPTS[1], 12)
    assert expected[-1] == eos
    engine = make_engine(m2_batching, model)
    params = [greedy(12, ignore_eos=False), greedy(12)]
    stopped, ignoring = engine.generate([PROMPTS[1]] * 2, params)
    assert (stopped.token_ids, stopped.finish_reason) == (expected, "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (
        hf_greedy("llama", PROMPTS[1]),
        "length",
    )


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_the_last_position_of_the_model_is_used(family):
    model = tiny_model(family, max_position_embeddings=32)
    (prompt,) = random_prompts([20], seed=2)
    (output,) = make_engine(m2_batching, model).generate(prompt, greedy(12))
    assert (len(output.token_ids), output.finish_reason) == (12, "length")
    assert output.token_ids == hf_generate(model, prompt, 12, eos_token_id=model.config.vocab_size)


def test_the_model_is_hugging_faces_own_again_after_every_step():
    model = tiny_model("llama")
    engine = make_engine(m2_batching, model)
    engine.add_request(PROMPTS[0], greedy(4))
    engine.step()
    assert model.config._attn_implementation != REGION_ATTENTION
    assert hf_generate(model, PROMPTS[2], 12, eos_token_id=199) == hf_greedy("llama", PROMPTS[2])
    engine.step()


@pytest.mark.parametrize(
    ("family", "overrides", "feature"),
    [("gemma3", {"attn_logit_softcapping": 50.0}, "soft-capping")],
)
def test_a_model_feature_that_is_not_supported_is_refused_by_name(family, overrides, feature):
    with pytest.raises(ValueError, match=feature):
        m2_batching.LLMEngine(tiny_model(family, **overrides))


def test_smollm2_names_the_capital_of_france_as_generate_does(smollm2: LoadedModel):
    engine = m2_batching.LLMEngine(
        smollm2.model, tokenizer=smollm2.tokenizer, max_num_seqs=2, max_model_len=128
    )
    questions = ["What is the capital of France?", "Hi"]
    params = [SamplingParams(temperature=0, max_tokens=num) for num in (10, 3)]
    outputs = engine.generate(questions, params, chat=True)
    assert "Paris" in outputs[0].text
    for output, num in zip(outputs, (10, 3), strict=True):
        expected = hf_generate_once(smollm2.model, tuple(output.prompt_token_ids), num)
        assert output.token_ids == expected
