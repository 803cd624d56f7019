"""Guesses made on the device, in steps launched before the tokens before them are known.

The twins of the kernels run here. The models look at little but the last token, so that their
texts run in circles.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest

import m5_kernels
from engine_helpers import assert_empty, greedy, make_engine, random_prompts
from m1_single import RequestOutput, SamplingParams
from m4_prefix_chunked.ngram import NgramProposer
from m5_helpers import circling
from m5_kernels.hf_runner import HFRunner
from milestone_llm.core.request import Request

VOCAB = 40


@functools.cache
def model(family: str = "llama") -> Any:
    return circling(family, vocab_size=VOCAB).double()


def work(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    beginning = [token % VOCAB for token in random_prompts([12], seed=rng.randrange(3))[0]]
    prompts, params = [], []
    for index in range(6):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        prompts.append(rng.choice([[], beginning]) + own)
        max_tokens = rng.choice([1, 2, 20, 40, 60])
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 0, 0.3, 1]),
                top_k=rng.choice([0, 4]),
                seed=index,
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, max_tokens // 2]),
                repetition_penalty=rng.choice([1, 1, 1.1]),
                frequency_penalty=(0, 0, 0.05)[index % 3],
                presence_penalty=(0, -0.1)[index % 2],
                logit_bias=({}, {}, {5: 0.5, 9: -100})[index // 2],
                stop_token_ids=rng.choice([[], [rng.randrange(VOCAB)], list(range(20, 38))]),
                ignore_eos=rng.random() < 0.5,
                logprobs=rng.choice([None, 2]),
                prompt_logprobs=rng.choice([None, None, 1]),
                n=rng.choice([1, 1, 2]),
            )
        )
    return prompts, params


def facts(output: RequestOutput) -> Any:
    """Tokens, why they end, and how likely they were."""
    return [
        (
            each.token_ids,
            each.finish_reason,
            [{k: round(v.logprob, 4) for k, v in entry.items()} for entry in each.logprobs or []],
        )
        for each in output.outputs
    ]


def engine(**fields: Any) -> Any:
    fields = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16, **fields}
    return make_engine(m5_kernels, fields.pop("model", model()), **fields)


@pytest.mark.parametrize("seed", range(1, 7))
def test_whatever_is_asked_for_every_request_gets_what_it_gets_without_guesses(seed):
    rng = random.Random(seed)
    prompts, params = work(rng)
    wanted = [facts(output) for output in engine().generate(prompts, params)]
    fields = {
        "speculation": "ngram",
        "num_speculative_tokens": rng.choice([1, 3, 5]),
        "kv_cache_tokens": rng.choice([64, 100, 500]),
        "preemption": rng.choice(["recompute", "swap"]),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    for switch in ({}, {"async_scheduling": False}):
        made = engine(**fields, **switch)
        assert [facts(output) for output in made.generate(prompts, params)] == wanted
        assert made.stats()["spec_decode_num_accepted_tokens"] > 0
        assert_empty(made)


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [3, 24])  # of many requests guesses attend together
def test_on_a_gpu_in_fp32_tokens_are_those_without_guesses(num_requests):
    rng = random.Random(num_requests)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(24)]
    params = [
        SamplingParams(temperature=0.3 * (seed % 2), seed=seed, max_tokens=30, ignore_eos=True)
        for seed in range(24)
    ]
    fields = {
        "model": copy.deepcopy(model()).float().cuda(),
        "max_num_seqs": num_requests,
        "max_num_batched_tokens": 256,
    }
    wanted = [output.token_ids for output in engine(**fields).generate(prompts, params)]
    fields |= {"speculation": "ngram", "speculation_max_num_seqs": num_requests}
    made = engine(**fields)
    assert [output.token_ids for output in made.generate(prompts, params)] == wanted
    assert made.stats()["spec_decode_num_accepted_tokens"] > 24
    assert_empty(made)


def test_a_request_that_repeats_takes_fewer_steps_though_none_waits_for_tokens():
    """The records tell where rows began, once that was known."""
    prompt = [1, 2, 3, 4, 5] * 4
    made = engine(speculation="ngram", trace="memory")
    output = made.generate(prompt, greedy(40))[0]
    assert output.token_ids == engine().generate(prompt, greedy(40))[0].token_ids
    records = made.tracer.records
    assert len(records) < 36
    ends = [record.batch[0].end for record in records]
    starts = [record.batch[0].start for record in records]
    assert starts == [0, *ends[:-1]]
    assert made.stats()["recomputed_tokens"] == 0


def test_a_row_for_which_nothing_was_found_has_not_guessed():
    """The host asks for guesses without knowing the tokens, and learns later whether there were."""
    prompt = [1, 2, 3, 4, 5, 6, 7]
    made = engine(speculation="ngram", trace="memory")
    tokens = prompt + made.generate(prompt, greedy(40))[0].token_ids
    rows = [record.batch[0] for record in made.tracer.records]
    for row in rows[1:]:
        known = Request("r", tokens[: row.start + 1], greedy(1))
        assert not row.num_draft_tokens or NgramProposer().propose(known, 3)
    stats = made.stats()
    assert stats["spec_decode_num_drafts"] == sum(row.num_draft_tokens > 0 for row in rows)
    num_wrong = sum(row.num_draft_tokens - row.num_accepted_tokens for row in rows)
    assert stats["padding_tokens"] > num_wrong > 0  # places that stayed empty, too


def test_many_rows_do_not_guess():
    made = engine(speculation="ngram", speculation_max_num_seqs=2, trace="memory")
    made.generate([[1, 2, 3, 4, 5] * 3] * 4, [greedy(length) for length in (10, 20, 45, 49)])
    for record in made.tracer.records:
        assert len(record.batch) <= 2 or not any(row.num_draft_tokens for row in record.batch)
    assert made.stats()["spec_decode_num_drafts"] > 0


def test_families_without_a_fused_decoder_guess_on_the_host():
    prompts = [[token % VOCAB for token in prompt] for prompt in random_prompts([5, 9])]
    plain = engine(model=model("gemma3"))
    made = engine(model=model("gemma3"), speculation="ngram")
    assert isinstance(made.runner, HFRunner)
    wanted = [output.token_ids for output in plain.generate(prompts, greedy(30))]
    assert [output.token_ids for output in made.generate(prompts, greedy(30))] == wanted
    assert made.stats()["spec_decode_num_accepted_tokens"] > 0
