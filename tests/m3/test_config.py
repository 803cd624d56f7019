"""A configuration that cannot serve all it would admit is refused, with number and limit."""

from __future__ import annotations

import pytest

from engine_helpers import tiny_model
from m3_paged import EngineConfig, LLMEngine, kv_memory
from milestone_llm.models.tiny_models import build_tiny_model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens must be at least 1, got 0"),
        ({"swap_space_tokens": -1}, "swap_space_tokens must be at least 0, got -1"),
        ({"preemption": "drop"}, '"recompute" or "swap", got \'drop\''),
        ({"gpu_memory_utilization": 0.0}, r"\(0, 1\], got 0.0"),
        ({"gpu_memory_utilization": 1.5}, r"\(0, 1\], got 1.5"),
        ({"policy": "random"}, '"fcfs" or "priority", got \'random\''),
        ({"kv_cache_token": 64}, "'kv_cache_token'.*did you mean 'kv_cache_tokens'"),
        (
            {"max_model_len": 65, "kv_cache_tokens": 64},
            "4 KV blocks of 16 hold 64 tokens, fewer than .*max_model_len=65",
        ),
        (  # 79 tokens are 4 whole blocks
            {"max_model_len": 65, "kv_cache_tokens": 79},
            "4 KV blocks of 16 hold 64 tokens, fewer than .*max_model_len=65",
        ),
        ({"max_model_len": 8, "kv_cache_tokens": 15}, "0 KV blocks of 16 hold 0 tokens"),
        (
            {"max_model_len": 64, "max_num_batched_tokens": 63},
            "max_model_len=64 .* max_num_batched_tokens=63",
        ),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8, "max_model_len": 8},
            "max_num_batched_tokens=8 .* max_num_seqs=9",
        ),
    ],
)
def test_bad_configuration_is_refused_at_construction(fields, message):
    with pytest.raises(ValueError, match=message):
        LLMEngine(tiny_model(), **fields)


def test_limits_that_are_just_met_are_taken():
    engine = LLMEngine(
        tiny_model(), max_model_len=64, kv_cache_tokens=64, max_num_batched_tokens=64
    )
    assert engine.stats()["kv"]["total"] == 4


def test_without_a_number_a_cpu_gets_the_memory_that_slots_would_take():
    """Rounded up to whole blocks a request, so that max_num_seqs full-length requests fit."""
    engine = LLMEngine(tiny_model(), max_num_seqs=3, max_model_len=50)
    assert engine.stats()["kv"]["total"] == 3 * 4


@pytest.mark.parametrize(
    ("fields", "num_host_blocks"),
    [
        ({}, 0),
        ({"swap_space_tokens": 100}, 0),  # recompute needs none
        ({"preemption": "swap"}, 8),
        ({"preemption": "swap", "swap_space_tokens": 0}, 0),
        ({"preemption": "swap", "swap_space_tokens": 47}, 2),
    ],
)
def test_swap_space_is_whole_blocks_and_only_for_swapping(fields, num_host_blocks):
    engine = LLMEngine(tiny_model(), max_model_len=64, kv_cache_tokens=128, **fields)
    assert engine.scheduler.preempter.host.pool.num_blocks == num_host_blocks
    assert {len(keys) for keys in engine.runner.cache.host_keys} == {num_host_blocks}


def test_defaults():
    config = EngineConfig()
    assert (config.block_size, config.preemption) == (16, "recompute")
    assert type(LLMEngine(tiny_model()).config) is EngineConfig


@pytest.mark.parametrize(("limit", "expected"), [(2**30, 96), (50 * 512, 48), (511, 0)])
def test_unless_told_swapping_takes_as_much_as_kv_but_not_all_of_the_host(
    monkeypatch, limit, expected
):
    monkeypatch.setattr(kv_memory, "SWAP_SPACE_BYTES", limit)  # 512 bytes a token
    fields = {"max_num_seqs": 2, "max_model_len": 48, "preemption": "swap"}
    engine = LLMEngine(build_tiny_model("llama"), **fields)
    assert engine.scheduler.preempter.host.pool.num_blocks * 16 == expected


def test_a_gpu_gets_more_rows_unless_a_number_is_given():
    config = EngineConfig()
    assert config.on_device("cpu", ()).max_num_seqs == 8
    assert config.on_device("cuda", ("block_size",)).max_num_seqs == 256
    assert EngineConfig(max_num_seqs=8).on_device("cuda", ("max_num_seqs",)) == config
