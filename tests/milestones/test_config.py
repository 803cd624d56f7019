"""A configuration that cannot serve all it would admit is refused, with number and limit."""

from __future__ import annotations

import pytest

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
from engine_helpers import greedy, hf_greedy, make_engine, random_prompts, run_to_end, tiny_model
from m3_paged import kv_memory
from milestone_llm.models.tiny_models import build_tiny_model

AGING = {"policy": "priority", "aging_seconds": 2}
WHOLE = {"enable_chunked_prefill": False}


@pytest.mark.parametrize(
    ("package", "fields", "message"),
    [
        (m1_single, {"aging_seconds": 3}, "no field 'aging_seconds'"),
        (m2_batching, {"policy": "lifo"}, "policy.*'lifo'"),
        (m2_batching, {"max_num_seqs": 9, "max_num_batched_tokens": 8}, "=8 .* max_num_seqs=9"),
        (m2_batching, {**AGING, "aging_seconds": 0}, "aging_seconds must be above 0, got 0"),
        (m2_batching, {**AGING, "aging_seconds": float("inf")}, "must be above 0, got inf"),
        (m2_batching, {**AGING, "aging_seconds": True}, "aging_seconds must be of type"),
        (m2_batching, {"aging_seconds": 3}, 'is for policy="priority"'),
        (m3_paged, {"block_size": 0}, "block_size must be at least 1, got 0"),
        (m3_paged, {"kv_cache_tokens": 0}, "kv_cache_tokens must be at least 1, got 0"),
        (m3_paged, {"swap_space_tokens": -1}, "swap_space_tokens must be at least 0, got -1"),
        (m3_paged, {"preemption": "drop"}, '"recompute" or "swap", got \'drop\''),
        (m3_paged, {"gpu_memory_utilization": 0.0}, r"\(0, 1\], got 0.0"),
        (m3_paged, {"kv_cache_token": 64}, "'kv_cache_token'.*did you mean 'kv_cache_tokens'"),
        (  # 79 tokens are 4 whole blocks
            m3_paged,
            {"max_model_len": 65, "kv_cache_tokens": 79},
            "4 KV blocks of 16 hold 64 tokens, fewer than .*max_model_len=65",
        ),
        (
            m3_paged,
            {"max_model_len": 64, "max_num_batched_tokens": 63},
            "max_model_len=64 .* max_num_batched_tokens=63",
        ),
        (m4_prefix_chunked, {"prefill_policy": "first"}, "or \"prefill_first\", got 'first'"),
        (
            m4_prefix_chunked,
            {"long_prefill_token_threshold": 8, **WHOLE},
            "long_prefill_token_threshold=8 .* enable_chunked_prefill is False",
        ),
        (m4_prefix_chunked, {"max_num_batched_tokens": 0}, "must be at least 1, got 0"),
        (  # without chunks, M3's limits hold
            m4_prefix_chunked,
            {"max_model_len": 64, "max_num_batched_tokens": 63, **WHOLE},
            "max_model_len=64 .* max_num_batched_tokens=63",
        ),
        (m4_prefix_chunked, {"speculation": "eagle"}, "speculation"),
        (m4_prefix_chunked, {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        (m4_prefix_chunked, {"speculation_max_num_seqs": 0}, "speculation_max_num_seqs"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(package, fields, message):
    with pytest.raises(ValueError, match=message):
        package.LLMEngine(tiny_model(), **fields)


def test_limits_that_are_just_met_are_taken():
    fields = {"max_model_len": 64, "kv_cache_tokens": 64, "max_num_batched_tokens": 64}
    assert m3_paged.LLMEngine(tiny_model(), **fields).stats()["kv"]["total"] == 4


def test_without_a_number_a_cpu_gets_the_memory_that_regions_would_take():
    """Rounded up to whole blocks a request, so that max_num_seqs full-length requests fit."""
    engine = m3_paged.LLMEngine(tiny_model(), max_num_seqs=3, max_model_len=50)
    assert engine.stats()["kv"]["total"] == 3 * 4


@pytest.mark.parametrize(
    ("fields", "num_host_blocks"),
    [
        ({"swap_space_tokens": 100}, 0),  # recompute needs none
        ({"preemption": "swap"}, 8),
        ({"preemption": "swap", "swap_space_tokens": 47}, 2),
    ],
)
def test_swap_space_is_whole_blocks_and_only_for_swapping(fields, num_host_blocks):
    engine = m3_paged.LLMEngine(tiny_model(), max_model_len=64, kv_cache_tokens=128, **fields)
    assert engine.scheduler.preempter.host.pool.num_blocks == num_host_blocks
    assert {len(keys) for keys in engine.runner.cache.host_keys} == {num_host_blocks}


@pytest.mark.parametrize(("limit", "expected"), [(2**30, 96), (50 * 512, 48), (511, 0)])
def test_unless_told_swapping_takes_as_much_as_kv_but_not_all_of_the_host(
    monkeypatch, limit, expected
):
    monkeypatch.setattr(kv_memory, "SWAP_SPACE_BYTES", limit)  # 512 bytes a token
    fields = {"max_num_seqs": 2, "max_model_len": 48, "preemption": "swap"}
    engine = m3_paged.LLMEngine(build_tiny_model("llama"), **fields)
    assert engine.scheduler.preempter.host.pool.num_blocks * 16 == expected


def test_a_gpu_gets_more_rows_unless_a_number_is_given():
    config = m3_paged.EngineConfig()
    assert config.on_device("cpu", ()).max_num_seqs == 8
    assert config.on_device("cuda", ("block_size",)).max_num_seqs == 256
    assert m3_paged.EngineConfig(max_num_seqs=8).on_device("cuda", ("max_num_seqs",)) == config


def test_bad_prompts_are_refused_with_number_and_limit_and_disturb_nobody():
    """Chunks carry any prompt: a step may be smaller than one, and than max_num_seqs."""
    engine = make_engine(m4_prefix_chunked, max_model_len=24, max_num_batched_tokens=3)
    good, long = random_prompts([6, 24])
    engine.add_request(good, greedy(3), "good")
    engine.step()
    with pytest.raises(ValueError, match=r"24 .*max_model_len"):
        engine.add_request(long, greedy(1))
    with pytest.raises(ValueError, match=r"n=5 .* max_num_seqs=4"):
        engine.add_request(good, greedy(1, n=5))
    assert run_to_end(engine)["good"].token_ids == hf_greedy("llama", good, 3)
