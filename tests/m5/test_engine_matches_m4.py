"""M5 gives M4's tokens: whatever the configuration, the batch, the arrivals and the parameters."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import m4_prefix_chunked
import m5_kernels
from m5_helpers import penalised, workload
from milestone_llm.models.tiny_models import build_tiny_model

MAX_MODEL_LEN = 112
FUSED = ["llama", "mistral", "qwen2", "qwen3"]


@functools.cache
def model_of(family: str, device: str = "cpu") -> Any:
    return build_tiny_model(family).to(device)


@functools.cache
def reference(family: str, has_penalties: bool, device: str = "cpu") -> list[Any]:
    prompts, params = workload()
    engine = m4_prefix_chunked.LLMEngine(
        model_of(family, device), max_num_seqs=10, max_model_len=MAX_MODEL_LEN, kv_cache_tokens=1600
    )
    outputs = engine.generate(prompts, penalised(params) if has_penalties else params)
    return [
        (token_ids, reason, pytest.approx(logprobs, abs=1e-3))
        for token_ids, reason, logprobs in map(summary, outputs)
    ]


def summary(output: Any) -> tuple[Any, ...]:
    """Tokens, finish reason and log-probabilities."""
    steps = output.logprobs or []
    logprobs = [each.logprob for step in steps for _, each in sorted(step.items())]
    return output.token_ids, output.finish_reason, logprobs


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
    stats = engine.stats()
    assert stats["kv"]["free"] == stats["kv"]["total"]
    assert not engine.has_unfinished_requests()
    if engine.decoder is not None:  # rows are taken back with the next launch
        rows = engine.runner.rows
        assert all(request.is_finished for _, request in rows.values())
        used = [row for row, _ in rows.values()]
        assert sorted(used + engine.runner.free_rows) == list(range(engine.config.max_num_seqs))


def check_same_tokens(family: str, device: str, has_penalties: bool, config: Any) -> None:
    prompts, params = workload()
    engine = m5_kernels.LLMEngine(
        model_of(family, device), max_model_len=MAX_MODEL_LEN, check_invariants=True, **config
    )
    params = penalised(params) if has_penalties else params
    for _ in range(2):  # the second time with what is cached by then
        outputs = engine.generate(prompts, params)
        got = [summary(output) for output in outputs]
        assert got == reference(family, has_penalties, device)
    assert_nothing_left(engine)


@settings(max_examples=12)
@given(family=st.sampled_from(FUSED), has_penalties=st.booleans(), config=CONFIGS)
def test_any_configuration_gives_the_tokens_of_m4(
    family: str, has_penalties: bool, config: Any
) -> None:
    check_same_tokens(family, "cpu", has_penalties, config)


@settings(max_examples=8)
@given(config=CONFIGS, seed=st.integers(0, 2**16))
def test_any_arrivals_and_aborts_give_the_tokens_of_m4(config: Any, seed: int) -> None:
    prompts, params = workload()
    expected, rng = reference("llama", False), random.Random(seed)
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
                final[index_of[output.request_id]] = summary(output)
        if index_of and rng.random() < 0.05:
            request_id = rng.choice(list(index_of))
            output = engine.abort(request_id)
            if output is not None:
                so_far = expected[index_of[request_id]][0]
                assert output.token_ids == so_far[: len(output.token_ids)]
                final[index_of[request_id]] = expected[index_of[request_id]]
    assert [final[i] for i in range(10)] == expected
    assert_nothing_left(engine)


@pytest.mark.parametrize("family", ["gemma3", "opt", "gpt2"])
def test_families_without_a_fused_decoder_give_the_tokens_of_m4(family: str) -> None:
    check_same_tokens(family, "cpu", False, {"max_num_seqs": 6, "kv_cache_tokens": 400})


def test_completions_of_one_prompt_are_those_of_m4() -> None:
    prompts, params = workload()
    params = [replace(p, n=3, temperature=1.0, max_tokens=12, ignore_eos=True) for p in params[:4]]
    outputs = []
    for package in (m4_prefix_chunked, m5_kernels):
        engine = package.LLMEngine(model_of("llama"), max_model_len=MAX_MODEL_LEN)
        outputs.append(engine.generate(prompts[:4], params))
        assert engine.stats()["copied_blocks"] > 3
    m4, m5 = ([[c.token_ids for c in output.outputs] for output in each] for each in outputs)
    assert m5 == m4


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FUSED, "gemma3", "opt", "gpt2"])
@pytest.mark.parametrize("pool", [160, 1600])
@pytest.mark.parametrize("switch", [{}, {"enforce_eager": True}, {"async_scheduling": False}])
def test_on_a_gpu_in_fp32_tokens_are_those_of_m4(family: str, pool: int, switch: Any) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    config = {"max_num_seqs": 6, "kv_cache_tokens": pool, "max_num_batched_tokens": 64, **switch}
    for has_penalties in (False, True):
        check_same_tokens(family, "cuda", has_penalties, config)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_engine_runs_on_the_second_gpu_while_the_first_is_current(family: str) -> None:
    for device in ("cuda:0", "cuda:1"):
        check_same_tokens(family, device, True, {"max_num_seqs": 6, "kv_cache_tokens": None})
    assert torch.cuda.current_device() == 0
