"""Switches that do not go together and limits that cannot be met are refused, with the numbers."""

from __future__ import annotations

import pytest

import m4_prefix_chunked
from engine_helpers import greedy, hf_greedy, make_engine, random_prompts, run_to_end, tiny_model
from m4_prefix_chunked import EngineConfig, LLMEngine
from prefix_helpers import Life, request_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill_policy": "first"}, '"mixed" or "prefill_first", got \'first\''),
        (
            {"long_prefill_token_threshold": -1},
            "long_prefill_token_threshold must be at least 0, got -1",
        ),
        (
            {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
            "long_prefill_token_threshold=8 .* enable_chunked_prefill is False",
        ),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        ({"enable_prefix_cache": True}, "did you mean 'enable_prefix_caching'"),
        (
            {"max_model_len": 65, "kv_cache_tokens": 64},
            "4 KV blocks of 16 hold 64 tokens, fewer than .*max_model_len=65",
        ),
        (  # without chunks, M3's limits hold
            {"enable_chunked_prefill": False, "max_model_len": 64, "max_num_batched_tokens": 63},
            "max_model_len=64 .* max_num_batched_tokens=63",
        ),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_seqs": 9,
                "max_num_batched_tokens": 8,
                "max_model_len": 8,
            },
            "max_num_batched_tokens=8 .* max_num_seqs=9",
        ),
    ],
)
def test_bad_configuration_is_refused_at_construction(fields, message):
    with pytest.raises(ValueError, match=message):
        LLMEngine(tiny_model(), **fields)


def test_defaults():
    config = EngineConfig()
    assert config.enable_prefix_caching
    assert config.enable_chunked_prefill
    assert (config.prefill_policy, config.long_prefill_token_threshold) == ("mixed", 0)
    assert type(LLMEngine(tiny_model()).config) is EngineConfig


@pytest.mark.parametrize(
    ("threshold", "budget", "most"), [(0, 64, 64), (16, 64, 16), (16, 5, 5), (100, 64, 64)]
)
def test_the_most_tokens_of_a_row(threshold, budget, most):
    life = Life(16, 16, long_prefill_token_threshold=threshold, max_num_batched_tokens=budget)
    life.add(request_of("a", [5] * 200))
    (row,) = life.plan().rows
    assert row.num_new_tokens == most


def test_with_chunks_a_step_may_be_smaller_than_a_prompt_and_than_max_num_seqs():
    (prompt,) = random_prompts([20])
    engine = make_engine(
        m4_prefix_chunked, max_num_seqs=8, max_model_len=24, max_num_batched_tokens=3
    )
    (output,) = engine.generate(prompt, greedy(3))
    assert output.token_ids == hf_greedy("llama", prompt, 3)


def test_bad_prompts_are_refused_with_number_and_limit_and_disturb_nobody():
    engine = make_engine(m4_prefix_chunked, max_model_len=24, max_num_batched_tokens=3)
    good, long = random_prompts([6, 24])
    engine.add_request(good, greedy(3), "good")
    engine.step()
    with pytest.raises(ValueError, match=r"24 .*max_model_len"):
        engine.add_request(long, greedy(1))
    with pytest.raises(ValueError, match=r"n=5 .* max_num_seqs=4"):
        engine.add_request(good, greedy(1, n=5))
    assert run_to_end(engine)["good"].token_ids == hf_greedy("llama", good, 3)


def test_more_completions_than_rows_are_refused_also_in_chunks():
    with pytest.raises(ValueError, match="n=4"):
        Life(max_num_seqs=3).add(request_of("a", [1, 2, 3], n=4))
