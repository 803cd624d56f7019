"""Guesses made on the device, in steps launched before the tokens before them are known.

The twins of the kernels run here. The models look at little but the last token, so that their
texts run in circles.
"""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import replace
from typing import Any

import pytest

import m4_prefix_chunked
import m5_kernels
from helpers.engines import (
    assert_empty,
    break_at_call,
    greedy,
    make_engine,
    random_prompts,
    run_to_end,
    tiny_model,
)
from helpers.m5_models import circling, facts, nearly, with_recomputed_graphs, workload
from m1_single import SamplingParams
from m4_prefix_chunked.ngram import NgramProposer
from m5_kernels.decoder.hf_decoder import HFDecoder
from m5_kernels.extras.spec_decode.spec_decode_runner import shape_of
from m5_kernels.step_graphs import MAX_CHUNKS
from milestone_llm.core.request import Request

VOCAB = 40


@functools.cache
def model(family: str = "llama") -> Any:
    return circling(family, vocab_size=VOCAB).double()


def engine(package: Any = m5_kernels, **fields: Any) -> Any:
    fields = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16, **fields}
    return make_engine(package, fields.pop("model", model()), **fields)


@pytest.mark.parametrize("seed", range(1, 7))
def test_whatever_is_asked_for_every_request_gets_what_it_gets_without_guesses(seed):
    rng, work = random.Random(seed), workload(seed, VOCAB, longest=60)
    fields: dict[str, Any] = {"max_model_len": 144}
    wanted = [nearly(facts(output)) for output in engine(**fields).generate(*work)]
    fields |= {
        "speculation": "ngram",
        "num_speculative_tokens": rng.choice([1, 3, 5]),
        "kv_cache_tokens": rng.choice([144, 200, 500]),
        "preemption": rng.choice(["recompute", "swap"]),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    for switch in ({}, {"async_scheduling": True}):
        made = engine(**fields, **switch)
        assert [facts(output) for output in made.generate(*work)] == wanted
        assert made.stats()["spec_decode_num_accepted_tokens"] > 0
        assert_empty(made)


def test_padded_steps_with_guesses_give_the_tokens_of_m4(poisoned):
    """Prompts that repeat, so that there are guesses; three rows of four places in a bucket."""
    prompts = [prompt * 3 for prompt in random_prompts([5, 7, 4])]
    fields: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 80}
    options: dict[str, Any] = {"speculation": "ngram", "async_scheduling": True}
    options |= {"adapt_backend": with_recomputed_graphs}
    engine = make_engine(m5_kernels, tiny_model(), **options, **fields)
    plain = make_engine(m4_prefix_chunked, tiny_model(), **fields)
    wanted, got = (
        [output.token_ids for output in each.generate(prompts, SamplingParams(seed=3))]
        for each in (plain, engine)
    )
    assert got == wanted
    assert shape_of(12) in engine.runner.graphs.replayed
    others = engine.runner.runner.graphs.replayed
    assert any(shape.num_chunks == MAX_CHUNKS for shape in others)


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
    made = engine(speculation="ngram", async_scheduling=True, trace="memory")
    output = made.generate(prompt, greedy(40))[0]
    assert output.token_ids == engine().generate(prompt, greedy(40))[0].token_ids
    records = made.tracer.records
    assert len(records) < 36
    ends = [record.batch[0].end for record in records]
    starts = [record.batch[0].start for record in records]
    assert starts == [0, *ends[:-1]]
    assert made.stats()["recomputed_tokens"] == 0


def test_the_host_guesses_as_in_m4_where_steps_are_settled_at_once():
    engines = [engine(package, speculation="ngram") for package in (m4_prefix_chunked, m5_kernels)]
    for each in engines:
        each.generate([1, 2, 3, 4, 5] * 4, greedy(40))
    theirs, ours = (each.stats() for each in engines)
    assert ours["steps"] == theirs["steps"] < 36
    name = "spec_decode_num_accepted_tokens"
    assert ours[name] == theirs[name] > 0


def test_a_row_for_which_nothing_was_found_has_not_guessed():
    """The host asks for guesses without knowing the tokens, and learns later whether there were."""
    prompt = [1, 2, 3, 4, 5, 6, 7]
    made = engine(speculation="ngram", async_scheduling=True, trace="memory")
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


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_families_without_a_fused_decoder_guess_as_well(is_pipelined):
    prompts = [[token % VOCAB for token in prompt] for prompt in random_prompts([5, 9])]
    plain = engine(model=model("gemma3"))
    made = engine(
        model=model("gemma3"),
        speculation="ngram",
        async_scheduling=is_pipelined,
        adapt_backend=lambda chosen: replace(chosen, decoder=HFDecoder),
    )
    assert isinstance(made.decoder, HFDecoder)
    wanted = [output.token_ids for output in plain.generate(prompts, greedy(30))]
    assert [output.token_ids for output in made.generate(prompts, greedy(30))] == wanted
    assert made.stats()["spec_decode_num_accepted_tokens"] > 0


def test_after_a_step_with_drafts_that_failed_the_next_requests_get_their_tokens(monkeypatch):
    """The device is told anew which position is which draft token."""
    prompts = [[1, 2, 3, 4, 5] * 4, [9, 8, 7] * 5, [3, 1] * 8]
    wanted = [output.token_ids for output in engine().generate(prompts, greedy(30))]
    made = engine(speculation="ngram", async_scheduling=True, trace="memory")
    made.add_request(prompts[0], greedy(40))
    while not made.stats()["spec_decode_num_accepted_tokens"]:
        made.step()
    with monkeypatch.context() as patch:
        break_at_call(patch, made.runner, "launch", {1}, OSError("the device is gone"))
        with pytest.raises(OSError, match="the device is gone"):
            made.step()
    run_to_end(made)
    assert [output.token_ids for output in made.generate(prompts, greedy(30))] == wanted
