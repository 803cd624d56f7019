"""Caching and chunking change what is computed when, and not one token.

The oracle for greedy requests is `generate`, for sampled ones M2, request by request. Prompts share
beginnings and every workload runs twice on an engine: the second time nearly all is cached.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import m2_batching
import m3_paged
import m4_prefix_chunked
from engine_helpers import (
    assert_empty,
    greedy,
    hf_generate_once,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
    tiny_model,
)
from m1_single import SamplingParams
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.models.tiny_models import TINY_FAMILIES

SYSTEM, TAIL, OTHER = random_prompts([32, 11, 27], seed=5)
PROMPTS = [
    SYSTEM,  # an exact multiple of the block sizes, and longer than the window of mistral, gemma3
    SYSTEM + TAIL[:1],
    SYSTEM + TAIL,
    SYSTEM[:16],
    SYSTEM[:24] + TAIL[:3],
    OTHER,
    OTHER[:1],
]
LENGTHS = [4, 3, 5, 6, 4, 3, 6]
MAX_MODEL_LEN = 48  # no more than the longest needs: pools for one request are then small
SEEDS = range(100, 103)


def sampled(max_tokens: int, n: int = 1, seed: int = SEEDS[0]) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, seed=seed, max_tokens=max_tokens, ignore_eos=True, n=n
    )


@functools.cache
def sampled_by_m2(family: str) -> dict[tuple[int, int], list[int]]:
    """Tokens of each prompt with each seed, one request each, by (prompt number, seed)."""
    works = [(number, seed) for number in range(len(PROMPTS)) for seed in SEEDS]
    engine = make_engine(m2_batching, tiny_model(family), max_num_seqs=8, max_model_len=64)
    outputs = engine.generate(
        [PROMPTS[number] for number, _ in works],
        [sampled(LENGTHS[number], seed=seed) for number, seed in works],
    )
    return {work: output.token_ids for work, output in zip(works, outputs, strict=True)}


def expected(family: str, number: int, n: int, is_greedy: bool) -> list[list[int]]:
    """Tokens of n completions of a prompt."""
    if is_greedy:
        return [hf_greedy(family, PROMPTS[number], LENGTHS[number])] * n
    return [sampled_by_m2(family)[number, seed] for seed in SEEDS[:n]]


def switches() -> st.SearchStrategy[dict[str, Any]]:
    """M4's own fields, such that they go together."""
    caching = st.sampled_from([True, True, True, False])
    policy = st.sampled_from(["mixed", "prefill_first"])
    chunks = st.fixed_dictionaries(
        {
            "enable_prefix_caching": caching,
            "prefill_policy": policy,
            "max_num_batched_tokens": st.sampled_from([3, 7, 16, 33, 500]),
            "long_prefill_token_threshold": st.sampled_from([0, 0, 4, 16]),
        }
    )
    whole = st.fixed_dictionaries(
        {
            "enable_prefix_caching": caching,
            "prefill_policy": policy,
            "enable_chunked_prefill": st.just(False),
        }
    )
    return chunks | chunks | whole


@pytest.mark.parametrize("family", TINY_FAMILIES)
@settings(max_examples=3)
@given(
    fields=switches(),
    block_size=st.sampled_from([1, 3, 4, 8, 16]),
    spare_tokens=st.sampled_from([0, 0, 16, 64, 200]),
    preemption=st.sampled_from(["recompute", "swap"]),
    is_greedy=st.booleans(),
    work=st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 3)), min_size=1, max_size=4
    ),
    aborts=st.dictionaries(st.integers(1, 20), st.integers(0, 3), max_size=2),
)
@example({"max_num_batched_tokens": 7}, 8, 0, "recompute", False, [(0, 1), (0, 3), (2, 1)], {})
@example({"max_num_batched_tokens": 9}, 4, 16, "swap", True, [(1, 2), (3, 1), (2, 1)], {4: 0})
def test_every_division_of_the_work_gives_the_right_tokens(
    family, fields, block_size, spare_tokens, preemption, is_greedy, work, aborts
):
    num_blocks = -(-(MAX_MODEL_LEN + spare_tokens) // block_size)
    engine = make_engine(
        m4_prefix_chunked,
        tiny_model(family),
        max_num_seqs=6,
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        kv_cache_tokens=num_blocks * block_size,
        preemption=preemption,
        **fields,
    )
    for turn in range(2):
        for place, (number, n) in enumerate(work):
            length = LENGTHS[number]
            params = greedy(length, n=n) if is_greedy else sampled(length, n)
            engine.add_request(PROMPTS[number], params, f"{place}")
        final, num_steps = {}, 0
        while engine.has_unfinished_requests():
            final |= {output.request_id: output for output in engine.step()}
            num_steps += 1
            if turn == 0 and num_steps in aborts:
                engine.abort(f"{aborts[num_steps]}")
                final.pop(f"{aborts[num_steps]}", None)
        if turn == 1:
            assert len(final) == len(work)
        for name, output in final.items():
            number, n = work[int(name)]
            tokens = [completion.token_ids for completion in output.outputs]
            if output.finished:
                assert tokens == expected(family, number, n, is_greedy)
        assert_empty(engine)
        assert engine.scheduler.preempter.host.pool.num_used == 0
    assert engine.reset_prefix_cache()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("budget", [1, 13])
def test_a_conversation_of_three_turns_computes_each_turn_once(family, budget):
    engine = make_engine(
        m4_prefix_chunked,
        tiny_model(family),
        max_model_len=80,
        block_size=4,
        max_num_batched_tokens=budget,
    )
    history: list[int] = []
    for turn in range(3):
        history = history + TAIL[turn : turn + 7]
        (output,) = engine.generate(history, greedy(6))
        assert output.token_ids == hf_greedy(family, history, 6)
        known = len(history) - 7 - 1 if turn else 0  # the last answer's last token has no KV
        assert output.metrics.num_cached_tokens == known // 4 * 4
        history = history + output.token_ids


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "opt"])
def test_prompts_longer_than_a_step_give_the_tokens_of_generate(family):
    """71 tokens in steps of 16; sliding windows span three chunks."""
    prompts = random_prompts([71, 17], seed=8)
    engine = make_engine(
        m4_prefix_chunked, tiny_model(family), max_model_len=96, max_num_batched_tokens=16
    )
    outputs = engine.generate(prompts, greedy(5))
    assert [output.token_ids for output in outputs] == [hf_greedy(family, p, 5) for p in prompts]
    assert engine.stats()["steps"] > 8


@pytest.mark.parametrize("is_cached", [True, False])
def test_logprobs_are_those_of_m3(is_cached):
    params = greedy(5, logprobs=3)
    (reference,) = make_engine(m3_paged, max_model_len=64).generate(PROMPTS[2], params)
    engine = make_engine(m4_prefix_chunked, max_model_len=64, max_num_batched_tokens=6)
    for _ in range(1 + is_cached):
        (output,) = engine.generate(PROMPTS[2], params)
    assert output.metrics.num_cached_tokens == (32 if is_cached else 0)
    for ours, theirs in zip(output.logprobs, reference.logprobs, strict=True):
        assert list(ours) == list(theirs)
        for token_id, logprob in ours.items():
            assert logprob.rank == theirs[token_id].rank
            assert logprob.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-9)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preemption_storm_with_a_shared_prefix_ends_with_every_token_right(preemption):
    """Ten requests and a pool for two of them at full length, in steps of 9 tokens."""
    prompts = [SYSTEM[:8] + own for own in random_prompts([i % 5 for i in range(10)], seed=7)]
    engine = make_engine(
        m4_prefix_chunked,
        max_num_seqs=10,
        max_model_len=24,
        block_size=4,
        kv_cache_tokens=48,
        max_num_batched_tokens=9,
        preemption=preemption,
    )
    outputs = engine.generate(prompts, greedy(12))
    assert [output.token_ids for output in outputs] == [hf_greedy("llama", p) for p in prompts]
    stats = engine.stats()
    assert min(stats["preemptions"], stats["prefix_cache"]["hits"]) > 5
    assert_empty(engine)


def test_priorities_and_late_arrivals_change_no_token():
    engine = make_engine(
        m4_prefix_chunked,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        kv_cache_tokens=64,
        max_num_batched_tokens=5,
        policy="priority",
    )
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(LENGTHS[number]), f"{number}", priority=-number)
        engine.step()
    for name, output in run_to_end(engine).items():
        number = int(name)
        assert output.token_ids == expected("llama", number, 1, True)[0]


def test_smollm2_chats_as_generate_does_with_a_cached_system_prompt(smollm2: LoadedModel):
    engine = m4_prefix_chunked.LLMEngine(
        smollm2.model,
        tokenizer=smollm2.tokenizer,
        max_num_seqs=2,
        max_model_len=128,
        max_num_batched_tokens=24,
        check_invariants=True,
    )
    questions = ["What is the capital of France?", "Hi"]
    params = [SamplingParams(temperature=0, max_tokens=num) for num in (10, 3)]
    outputs = engine.generate(questions, params, chat=True)
    assert "Paris" in outputs[0].text
    for output, num in zip(outputs, (10, 3), strict=True):
        oracle = hf_generate_once(smollm2.model, tuple(output.prompt_token_ids), num)
        assert output.token_ids == oracle
    assert outputs[1].metrics.num_cached_tokens >= 16, "the system prompt of the first"
    (again,) = engine.generate(questions[0], greedy(3), chat=True)
    assert again.token_ids == outputs[0].token_ids[:3]
    assert again.metrics.num_cached_tokens == len(again.prompt_token_ids) // 16 * 16
