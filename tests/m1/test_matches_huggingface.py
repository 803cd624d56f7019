"""Static batching gives the very tokens of `generate`, whoever shares the batch."""

from __future__ import annotations

import pytest

import m1_single
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
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.models.tiny_models import TINY_FAMILIES

SLIDING_WINDOW = tiny_model("mistral").config.sliding_window  # 24, as that of gemma3
PROMPTS = random_prompts([1, SLIDING_WINDOW + 17, 5, SLIDING_WINDOW, 2, SLIDING_WINDOW - 6])
LENGTHS = [12, 5, 1, 9, 8, 9]  # 18 + 9 grows out of the window while decoding


@pytest.mark.parametrize("max_num_seqs", [2, 8])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_ragged_batches_give_the_tokens_of_generate(family, max_num_seqs):
    engine = make_engine(m1_single, tiny_model(family), max_num_seqs=max_num_seqs)
    outputs = engine.generate(PROMPTS, [greedy(length) for length in LENGTHS])
    expected = [hf_greedy(family, *work) for work in zip(PROMPTS, LENGTHS, strict=True)]
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_eos_ends_a_row_where_generate_ends_and_stays_in_the_output(family):
    prompt = PROMPTS[1]
    eos = hf_greedy(family, prompt)[6]
    model = tiny_model(family, eos_token_id=eos)  # the same weights
    expected = hf_generate(model, prompt, 12)
    assert expected[-1] == eos
    assert len(expected) <= 7

    engine = make_engine(m1_single, model)
    params = [greedy(12, ignore_eos=False), greedy(12), greedy(12, ignore_eos=False)]
    stopped, ignoring, other = engine.generate([prompt, prompt, PROMPTS[3]], params)
    assert (stopped.token_ids, stopped.finish_reason) == (expected, "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (hf_greedy(family, prompt), "length")
    assert other.token_ids == hf_generate(model, PROMPTS[3], 12)


def test_pad_and_eos_ids_inside_a_prompt_are_ordinary_tokens():
    prompt = [7, 0, 0, 2, 1, 9]
    engine = make_engine(m1_single)
    for output in engine.generate([prompt, PROMPTS[1]], greedy(12))[:1]:
        assert output.token_ids == hf_greedy("llama", prompt, 12)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_finished_rows_may_drag_on_past_the_last_position_of_the_model(family):
    """The padding row's position must not grow past what learned positions have."""
    model = tiny_model(family, max_position_embeddings=32)
    long, short = random_prompts([30, 3], seed=2)
    engine = make_engine(m1_single, model)
    full, other = engine.generate([long, short], greedy(12))
    assert (len(full.token_ids), full.finish_reason) == (2, "length")
    assert other.token_ids == hf_generate(model, short, 12, eos_token_id=model.config.vocab_size)


def test_smollm2_names_the_capital_of_france_as_generate_does(smollm2: LoadedModel):
    engine = m1_single.LLMEngine(smollm2.model, tokenizer=smollm2.tokenizer, max_num_seqs=3)
    questions = ["What is the capital of France?", "Hi"]
    params = [SamplingParams(temperature=0, max_tokens=num) for num in (10, 3)]
    outputs = engine.generate(questions, params, chat=True)
    assert "Paris" in outputs[0].text
    assert "<|im_end|>" not in outputs[0].text
    assert outputs[0].finish_reason == "stop"
    for output, num in zip(outputs, (10, 3), strict=True):
        expected = hf_generate_once(smollm2.model, tuple(output.prompt_token_ids), num)
        assert output.token_ids == expected
