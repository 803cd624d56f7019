"""What an engine decides when it is built; what cannot work is refused, with number and limit."""

from __future__ import annotations

import pytest

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
import m5_kernels
from helpers.engines import assert_empty, every_milestone, greedy, random_prompts, tiny_model
from m3_paged import kv_memory
from milestone_llm.core.errors import InputError
from milestone_llm.models.tiny_models import build_tiny_model

AGING = {"policy": "priority", "aging_seconds": 2}
WHOLE = {"enable_chunked_prefill": False}


@every_milestone
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seq": 4}, "'max_num_seq'.*did you mean 'max_num_seqs'"),
        ({"zzz": 1}, "'zzz'.*it has .*max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be of type int, got '4'"),
        ({"check_invariants": 1}, "check_invariants must be of type bool, got 1"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1 .*one of output"),
        ({"max_model_len": 1025}, "max_model_len is 1025.*only 1024"),
        ({"trace": "nowhere"}, "trace must be .*'nowhere'"),
        ({"trace": "\0.jsonl"}, "cannot write"),
        ({"dtype": "float7"}, "dtype.*'float7'"),
        ({"device": "mps"}, "on a CPU or on CUDA.* not on mps"),
        ({"scheduler": "\ud800.py"}, "cannot read"),
    ],
)
def test_a_field_of_every_milestone_is_refused_at_construction(package, fields, message):
    with pytest.raises(InputError, match=message):
        package.LLMEngine(tiny_model(), **fields)


@pytest.mark.parametrize(
    ("package", "fields", "message"),
    [
        (m1_single, {"aging_seconds": 3}, "no field 'aging_seconds'"),
        (m2_batching, {"policy": "lifo"}, "policy.*'lifo'"),
        (m2_batching, {"max_num_seqs": 9, "max_num_batched_tokens": 8}, "=8 .* max_num_seqs=9"),
        (m2_batching, {**AGING, "aging_seconds": 0}, "aging_seconds must be above 0, got 0"),
        (m2_batching, {**AGING, "aging_seconds": True}, "aging_seconds must be of type"),
        (m2_batching, {"aging_seconds": 3}, 'is for policy="priority"'),
        (m3_paged, {"block_size": 0}, "block_size must be at least 1, got 0"),
        (m3_paged, {"kv_cache_tokens": 0}, "kv_cache_tokens must be at least 1, got 0"),
        (m3_paged, {"swap_space_tokens": -1}, "swap_space_tokens must be at least 0, got -1"),
        (m3_paged, {"preemption": "drop"}, '"recompute" or "swap", got \'drop\''),
        (m3_paged, {"gpu_memory_utilization": 0.0}, r"\(0, 1\], got 0.0"),
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


@every_milestone
def test_left_out_max_model_len_is_the_models_own_where_prompts_are_computed_in_chunks(package):
    engine = package.LLMEngine("tiny-llama", max_num_batched_tokens=64)
    assert engine.max_model_len == (64 if package.__name__ < "m4" else 1024)
    (prompt,) = random_prompts([engine.max_model_len - 2])
    (output,) = engine.generate(prompt, greedy(9))
    assert (len(output.token_ids), output.finish_reason) == (2, "length")
    assert_empty(engine)
    if package.__name__ >= "m4":
        fields = {"max_num_batched_tokens": 64, **WHOLE}
        assert package.LLMEngine("tiny-llama", **fields).max_model_len == 64


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels])
def test_left_out_max_model_len_is_no_more_than_kv_memory_holds(package, monkeypatch):
    monkeypatch.setattr(kv_memory, "CPU_KV_BYTES", 512 * 100)  # 512 bytes a token: six blocks
    left_out = package.LLMEngine("tiny-llama")
    assert (left_out.max_model_len, left_out.scheduler.num_blocks) == (96, 6)
    asked_for = package.LLMEngine("tiny-llama", max_model_len=200)
    assert (asked_for.max_model_len, asked_for.scheduler.num_blocks) == (200, 13)
    for engine in (left_out, asked_for):
        (prompt,) = random_prompts([engine.max_model_len - 1])
        assert len(engine.generate(prompt, greedy(9))[0].token_ids) == 1


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
    assert engine.scheduler.kv.preempter.host.pool.num_blocks == num_host_blocks
    assert {len(keys) for keys in engine.runner.cache.host_keys} == {num_host_blocks}


@pytest.mark.parametrize(("limit", "expected"), [(2**30, 96), (50 * 512, 48), (511, 0)])
def test_unless_told_swapping_takes_as_much_as_kv_but_not_all_of_the_host(
    monkeypatch, limit, expected
):
    monkeypatch.setattr(kv_memory, "SWAP_SPACE_BYTES", limit)  # 512 bytes a token
    fields = {"max_num_seqs": 2, "max_model_len": 48, "preemption": "swap"}
    engine = m3_paged.LLMEngine(build_tiny_model("llama"), **fields)
    assert engine.scheduler.kv.preempter.host.pool.num_blocks * 16 == expected


def test_a_gpu_gets_more_rows_unless_a_number_is_given():
    config = m3_paged.EngineConfig()
    assert config.on_device("cpu", ()).max_num_seqs == 8
    assert config.on_device("cuda", ("block_size",)).max_num_seqs == 256
    assert m3_paged.EngineConfig(max_num_seqs=8).on_device("cuda", ("max_num_seqs",)) == config
