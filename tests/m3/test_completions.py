"""Several completions of one prompt (`n`): computed once, shared, and each as if it were alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import m3_paged
from helpers.engines import (
    assert_empty,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
    tiny_model,
    word_tokenizer,
)
from m1_single import SamplingParams

(PROMPT,) = random_prompts([18])


def sampled(seed: int, max_tokens: int = 8, **params) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **params}
    )


def paged_engine(**fields):
    return make_engine(m3_paged, **{"max_model_len": 64, "block_size": 4, **fields})


def test_seeds_wrap_around_and_stay_in_64_bits():
    engine = paged_engine()
    engine.add_request(PROMPT, sampled(-2, n=4), "a")
    seeds = [request.seed for request in engine.driver.requests.values()]
    assert seeds == [2**64 - 2, 2**64 - 1, 0, 1]


def test_a_request_without_a_seed_has_different_completions_and_the_same_in_every_run():
    runs = [paged_engine(seed=5).generate(PROMPT, sampled(None, n=3))[0] for _ in range(2)]
    tokens = [[c.token_ids for c in run.outputs] for run in runs]
    assert tokens[0] == tokens[1]
    assert len({tuple(completion) for completion in tokens[0]}) == 3


def test_outputs_are_numbered_and_the_first_is_the_requests_own():
    engine = make_engine(m3_paged, tokenizer=word_tokenizer(), max_model_len=64)
    (output,) = engine.generate([[5, 6, 7]], sampled(3, 4, n=3, logprobs=2))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    first = output.outputs[0]
    assert (output.token_ids, output.text) == (first.token_ids, first.text)
    assert output.logprobs == first.logprobs
    for completion in output.outputs:
        assert completion.text == " ".join(f"w{token}" for token in completion.token_ids)
        for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
            assert token in logprobs


def test_stream_says_finished_only_when_the_last_completion_is():
    """A pool for one request: the completions end one after another."""
    engine = paged_engine(max_model_len=30, kv_cache_tokens=32)
    outputs = list(engine.stream(PROMPT, greedy(12, n=3)))
    assert engine.stats()["preemptions"] > 0
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].token_ids == hf_greedy("llama", PROMPT, 12)
    assert any(o.outputs[0].finish_reason and o.finish_reason is None for o in outputs)


def test_an_id_of_a_completion_is_taken_as_long_as_its_request_runs():
    engine = paged_engine()
    engine.add_request(PROMPT, greedy(4, n=2), "a")
    with pytest.raises(ValueError, match="'a/1' belongs to an unfinished request"):
        engine.add_request(PROMPT, greedy(4), "a/1")
    engine.add_request(PROMPT, greedy(4), "a/2")
    run_to_end(engine)
    engine.add_request(PROMPT, greedy(4), "a/1")
    run_to_end(engine)


@pytest.mark.parametrize("is_refused", [False, True])
def test_ids_are_looked_at_when_the_engine_is_changed_and_not_before(is_refused, monkeypatch):
    """While a prompt is encoded, another thread's request may come."""
    engine, order = paged_engine(), [("a", 2), ("a/1", 1)]
    encode = engine.input_processor.encode
    late, early = reversed(order) if is_refused else order

    def add(name: str, n: int) -> None:
        engine.add_request(PROMPT, greedy(6, n=n), name)

    def encode_slowly(*given: object) -> object:
        monkeypatch.undo()
        add(*early)
        return encode(*given)

    monkeypatch.setattr(engine.input_processor, "encode", encode_slowly)
    with pytest.raises(ValueError, match="a/1") if is_refused else nullcontext():
        add(*late)
    final = run_to_end(engine)
    assert {name: len(output.outputs) for name, output in final.items()} == (
        {"a": 2} if is_refused else {"a": 2, "a/1": 1}
    )
    expected = hf_greedy("llama", PROMPT, 6)
    assert all(c.token_ids == expected for each in final.values() for c in each.outputs)
    assert_empty(engine)


def test_n_is_refused_by_number_and_limit_and_harms_nobody():
    engine = paged_engine(max_num_seqs=3)
    with pytest.raises(ValueError, match=r"n=4 completions .* max_num_seqs=3"):
        engine.generate([PROMPT, PROMPT], [greedy(4), greedy(4, n=4)])
    assert_empty(engine)
    assert engine.generate(PROMPT, sampled(None))[0].token_ids == (
        m3_paged.LLMEngine(tiny_model(), max_model_len=64)
        .generate(PROMPT, sampled(None))[0]
        .token_ids
    )
