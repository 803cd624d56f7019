"""Block tables, preemption and sharing change where KV lies, and not one token.

The oracle for greedy requests is `generate`, for sampled ones M2, request by request.
"""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import m1_single
import m2_batching
import m3_paged
from engine_helpers import (
    assert_empty,
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

SLIDING_WINDOW = 24  # of tiny mistral and gemma3
PROMPTS = random_prompts([1, SLIDING_WINDOW + 17, 5, SLIDING_WINDOW, 2, SLIDING_WINDOW - 6])
LENGTHS = [8, 4, 1, 6, 5, 8]  # 18 + 8 grows out of the window while decoding
MAX_MODEL_LEN = 48  # no more than the longest needs: pools for one request are then small
SEEDS = range(100, 104)


def sampled(max_tokens: int, seed: int, n: int = 1) -> SamplingParams:
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
        [sampled(LENGTHS[number], seed) for number, seed in works],
    )
    return {work: output.token_ids for work, output in zip(works, outputs, strict=True)}


def expected(family: str, number: int, n: int, is_greedy: bool) -> list[list[int]]:
    """Tokens of n completions of a prompt."""
    if is_greedy:
        return [hf_greedy(family, PROMPTS[number], LENGTHS[number])] * n
    return [sampled_by_m2(family)[number, seed] for seed in SEEDS[:n]]


@pytest.mark.parametrize("family", TINY_FAMILIES)
@settings(max_examples=3)
@given(
    block_size=st.sampled_from([1, 3, 16, 64]),
    spare_tokens=st.sampled_from([0, 0, 1, 16, 64, 200]),
    preemption=st.sampled_from(["recompute", "swap"]),
    swap_share=st.sampled_from([0, 0.5, None]),
    is_greedy=st.booleans(),
    work=st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 4)), min_size=1, max_size=4
    ),
)
@example(3, 0, "recompute", None, False, [(3, 3), (5, 4)])
@example(3, 16, "swap", None, False, [(5, 2), (3, 2), (0, 4), (1, 1)])
def test_every_pool_that_holds_one_request_gives_the_right_tokens(
    family, block_size, spare_tokens, preemption, swap_share, is_greedy, work
):
    num_blocks = -(-(MAX_MODEL_LEN + spare_tokens) // block_size)
    engine = make_engine(
        m3_paged,
        tiny_model(family),
        max_num_seqs=6,
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        kv_cache_tokens=num_blocks * block_size,
        preemption=preemption,
        swap_space_tokens=None if swap_share is None else int(swap_share * num_blocks * block_size),
    )
    params = [
        greedy(LENGTHS[number], n=n) if is_greedy else sampled(LENGTHS[number], SEEDS[0], n)
        for number, n in work
    ]
    outputs = engine.generate([PROMPTS[number] for number, _ in work], params)
    for (number, n), output in zip(work, outputs, strict=True):
        tokens = [completion.token_ids for completion in output.outputs]
        assert tokens == expected(family, number, n, is_greedy)
    assert_empty(engine)
    assert engine.scheduler.preempter.host.pool.num_used == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preemption_storm_ends_with_every_token_right(preemption):
    """Twenty requests, and a pool for two of them at full length."""
    prompts = random_prompts([1 + i % 5 for i in range(20)], seed=7)
    engine = make_engine(
        m3_paged,
        max_num_seqs=20,
        max_model_len=17,
        block_size=4,
        kv_cache_tokens=40,
        preemption=preemption,
    )
    outputs = engine.generate(prompts, greedy(12))
    assert [output.token_ids for output in outputs] == [
        hf_greedy("llama", prompt, 12) for prompt in prompts
    ]
    stats = engine.stats()
    assert stats["preemptions"] >= 18
    assert stats["kv"]["watermark"] == stats["kv"]["total"] == 10
    assert_empty(engine)


@pytest.mark.parametrize(("family", "block_size"), [("llama", 1), ("gemma3", 7), ("gpt2", 16)])
def test_a_lone_request_grows_to_max_model_len_in_a_pool_of_just_that(family, block_size):
    model = tiny_model(family, max_position_embeddings=32)
    (prompt,) = random_prompts([20], seed=2)
    engine = make_engine(
        m3_paged, model, block_size=block_size, kv_cache_tokens=-(-32 // block_size) * block_size
    )
    (output,) = engine.generate(prompt, greedy(16))
    assert (len(output.token_ids), output.finish_reason) == (12, "length")
    assert output.token_ids == hf_generate(model, prompt, 12, eos_token_id=model.config.vocab_size)
    assert engine.stats()["preemptions"] == 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_reused_blocks_show_nothing_of_their_last_owner(family):
    engine = make_engine(
        m3_paged, tiny_model(family), max_model_len=48, block_size=4, kv_cache_tokens=48
    )
    for number in (1, 0, 5, 3):
        (output,) = engine.generate(PROMPTS[number], greedy(LENGTHS[number]))
        assert output.token_ids == expected(family, number, 1, True)[0]


@functools.cache
def matrix_oracle(is_greedy: bool) -> list[list[int]]:
    if is_greedy:
        return [expected("llama", number, 1, True)[0] for number in range(len(PROMPTS))]
    outputs = make_engine(m1_single).generate(PROMPTS, matrix_params(False))
    return [output.token_ids for output in outputs]


def matrix_params(is_greedy: bool) -> list[SamplingParams]:
    if is_greedy:
        return [greedy(length) for length in LENGTHS]
    return [sampled(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("layout", ["slot", "block"])
def test_regression_matrix(layout, call, is_greedy):
    """Slot or block, `generate` or `stream`, greedy or sampled: always the same tokens."""
    if layout == "slot":
        engine = make_engine(m2_batching, max_model_len=48)
    else:  # the same number of requests in a third of the memory
        engine = make_engine(m3_paged, max_model_len=48, kv_cache_tokens=64)
    if call == "generate":
        outputs = engine.generate(PROMPTS, matrix_params(is_greedy))
        tokens = [output.token_ids for output in outputs]
    else:
        latest: dict[str, list[int]] = {}
        for output in engine.stream(PROMPTS, matrix_params(is_greedy)):
            before = latest.get(output.request_id, [])
            assert output.token_ids[: len(before)] == before
            assert len(output.token_ids) == len(before) + 1
            latest[output.request_id] = output.token_ids
        tokens = [latest[f"r{number}"] for number in range(len(PROMPTS))]
    assert tokens == matrix_oracle(is_greedy)
    assert_empty(engine)


def test_smollm2_gives_generates_tokens_shared_preempted_and_recomputed(smollm2: LoadedModel):
    """Two completions in a pool for one: they share the prompt, and then one has to go."""
    engine = m3_paged.LLMEngine(
        smollm2.model,
        tokenizer=smollm2.tokenizer,
        max_num_seqs=2,
        max_model_len=48,
        kv_cache_tokens=48,
        check_invariants=True,
    )
    params = SamplingParams(temperature=0, max_tokens=10, n=2)
    (output,) = engine.generate("What is the capital of France?", params, chat=True)
    expected = hf_generate_once(smollm2.model, tuple(output.prompt_token_ids), 10)
    assert [completion.token_ids for completion in output.outputs] == [expected] * 2
    assert ["Paris" in completion.text for completion in output.outputs] == [True, True]
    assert engine.stats()["preemptions"] == 1
