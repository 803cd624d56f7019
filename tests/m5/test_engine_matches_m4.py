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
from m1_single import SamplingParams
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

MAX_MODEL_LEN = 112
FUSED = ["llama", "mistral", "qwen2", "qwen3"]


@functools.cache
def model_of(family: str, device: str = "cpu") -> Any:
    return build_tiny_model(family).to(device)


def workload(seed: int = 1) -> tuple[list[list[int]], list[SamplingParams]]:
    """Ten requests: shared prefixes, equal prompts, every way of sampling and of stopping."""
    rng = random.Random(seed)
    base = [rng.randrange(VOCAB_SIZE) for _ in range(48)]
    prompts, params = [], []
    for i in range(10):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 5, 16, 30]))]
        prompts.append(base[: rng.choice([0, 8, 16, 32, 48])] + own)
        params.append(
            SamplingParams(
                temperature=0.8 if i % 2 else 0.0,
                seed=i,
                max_tokens=rng.randint(1, 20),
                ignore_eos=i % 3 == 0,
                top_k=5 if i % 4 == 1 else 0,
                top_p=0.9 if i % 5 == 1 else 1.0,
                min_p=0.05 if i % 7 == 3 else 0.0,
                stop_token_ids=list(range(3, 60, 8)) if i % 2 else [],
            )
        )
    prompts[3] = prompts[4] = base[:32]
    return prompts, params


def penalised(params: list[SamplingParams]) -> list[SamplingParams]:
    """The same with two requests that have penalties and want log-probabilities."""
    special = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": -1.1,
        "logit_bias": {7: 2.5, 30: -100, 31: 0.5},
        "min_tokens": min(3, params[4].max_tokens, params[7].max_tokens),
        "logprobs": 2,
    }
    return [replace(p, **special) if i in (4, 7) else p for i, p in enumerate(params)]


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
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_on_a_gpu_in_fp32_tokens_are_those_of_m4(
    family: str, pool: int, enforce_eager: bool
) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    config = {"max_num_seqs": 6, "kv_cache_tokens": pool, "max_num_batched_tokens": 64}
    for has_penalties in (False, True):
        check_same_tokens(family, "cuda", has_penalties, {**config, "enforce_eager": enforce_eager})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_engine_runs_on_the_second_gpu_while_the_first_is_current(family: str) -> None:
    for device in ("cuda:0", "cuda:1"):
        check_same_tokens(family, device, True, {"max_num_seqs": 6, "kv_cache_tokens": None})
    assert torch.cuda.current_device() == 0


def check_seeded_requests_alone_and_together(device: str) -> None:
    """Every request sampled, each its own way: the same tokens however they are computed."""
    prompts, params = workload(seed=2)
    params = [
        replace(p, temperature=0.7 + 0.1 * i, seed=100 + i, max_tokens=20, stop_token_ids=[])
        for i, p in enumerate(params)
    ]
    limits = {"max_model_len": MAX_MODEL_LEN, "kv_cache_tokens": 1600}

    def tokens(**config: Any) -> list[list[int]]:
        engine = m5_kernels.LLMEngine(model_of("qwen3", device), **{**limits, **config})
        return [output.token_ids for output in engine.generate(prompts, params)]

    together = tokens(max_num_seqs=10)
    assert len({tuple(ids) for ids in together}) == len(prompts)
    assert tokens(max_num_seqs=10, enforce_eager=True) == together
    assert tokens(max_num_seqs=10, async_scheduling=False) == together
    assert tokens(max_num_seqs=3, kv_cache_tokens=160) == together
    assert tokens(max_num_seqs=1) == together


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    check_seeded_requests_alone_and_together("cpu")


@pytest.mark.gpu
def test_on_a_gpu_a_seed_fixes_the_tokens_with_and_without_graphs_and_pipelining() -> None:
    check_seeded_requests_alone_and_together("cuda")
