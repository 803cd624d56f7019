"""M5 gives M4's tokens: whatever the configuration, the batch, the arrivals and the parameters."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import m4_prefix_chunked
import m5_kernels
from helpers.engines import assert_empty
from helpers.m5_models import facts, nearly, workload
from milestone_llm.models.tiny_models import build_tiny_model

MAX_MODEL_LEN = 112
FUSED = ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe"]


@functools.cache
def model_of(family: str, device: str = "cpu") -> Any:
    return build_tiny_model(family).to(device)


@functools.cache
def reference(family: str, device: str = "cpu") -> list[Any]:
    engine = m4_prefix_chunked.LLMEngine(
        model_of(family, device), max_num_seqs=10, max_model_len=MAX_MODEL_LEN, kv_cache_tokens=1600
    )
    return [nearly(facts(output)) for output in engine.generate(*workload())]


CONFIGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([2, 3, 6, 10]),
        "block_size": st.sampled_from([1, 4, 16]),
        "kv_cache_tokens": st.sampled_from([112, 160, 400]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "swap_space_tokens": st.sampled_from([None, 32]),
        "enable_prefix_caching": st.booleans(),
        "prefill_policy": st.sampled_from(["mixed", "prefill_first"]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_num_batched_tokens": st.sampled_from([5, 20, 500]),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
        "async_scheduling": st.booleans(),
    }
)


def assert_nothing_left(engine: Any) -> None:
    assert_empty(engine)
    if engine.decoder is not None:  # rows are taken back with the next launch
        rows = engine.runner.rows
        assert all(request.is_finished for _, request in rows.values())
        used = [row for row, _ in rows.values()]
        assert sorted(used + engine.runner.free_rows) == list(range(engine.config.max_num_seqs))


def check_same_tokens(family: str, device: str, config: Any) -> None:
    engine = m5_kernels.LLMEngine(
        model_of(family, device), max_model_len=MAX_MODEL_LEN, check_invariants=True, **config
    )
    for _ in range(2):  # the second time with what is cached by then
        outputs = engine.generate(*workload())
        assert [facts(output) for output in outputs] == reference(family, device)
    assert_nothing_left(engine)


@settings(max_examples=12)
@given(family=st.sampled_from(FUSED), config=CONFIGS)
def test_any_configuration_gives_the_tokens_of_m4(family: str, config: Any) -> None:
    check_same_tokens(family, "cpu", config)


@settings(max_examples=8)
@given(config=CONFIGS, seed=st.integers(0, 2**16))
def test_any_arrivals_and_aborts_give_the_tokens_of_m4(config: Any, seed: int) -> None:
    prompts, params = workload()
    expected, rng = reference("llama"), random.Random(seed)
    engine = m5_kernels.LLMEngine(
        model_of("llama"), max_model_len=MAX_MODEL_LEN, check_invariants=True, **config
    )
    waiting, index_of, final = list(range(10)), {}, {}
    while waiting or engine.has_unfinished_requests():
        while waiting and rng.random() < 0.5:
            i = waiting.pop(0)
            request_id = engine.add_request(prompts[i], params[i], priority=rng.randint(0, 2))
            index_of[request_id] = i
        for output in engine.step():
            if output.finished:
                final[index_of[output.request_id]] = facts(output)
        if index_of and rng.random() < 0.05:
            request_id = rng.choice(list(index_of))
            last = engine.abort(request_id)
            if last is not None:
                whole = final[index_of[request_id]] = expected[index_of[request_id]]
                for each, (tokens, *_) in zip(last.outputs, whole, strict=True):
                    assert each.token_ids == tokens[: len(each.token_ids)]
    assert [final[i] for i in range(10)] == expected
    assert_nothing_left(engine)


@pytest.mark.parametrize("family", ["gemma3", "opt", "gpt2"])
def test_families_without_a_fused_decoder_give_the_tokens_of_m4(family: str) -> None:
    check_same_tokens(family, "cpu", {"max_num_seqs": 6, "kv_cache_tokens": 400})


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FUSED, "gemma3", "opt", "gpt2"])
@pytest.mark.parametrize("pool", [160, 1600])
@pytest.mark.parametrize("switch", [{}, {"enforce_eager": True}, {"async_scheduling": True}])
def test_on_a_gpu_in_fp32_tokens_are_those_of_m4(family: str, pool: int, switch: Any) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    config = {"max_num_seqs": 6, "kv_cache_tokens": pool, "max_num_batched_tokens": 64, **switch}
    check_same_tokens(family, "cuda", config)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_engine_runs_on_the_second_gpu_while_the_first_is_current(family: str) -> None:
    for device in ("cuda:0", "cuda:1"):
        check_same_tokens(family, device, {"max_num_seqs": 6, "kv_cache_tokens": None})
    assert torch.cuda.current_device() == 0
