"""What `generate` takes and gives back: prompts, parameters, finish reasons, log-probabilities,
times and counts.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch

from helpers.engines import (
    PACKAGES,
    as_text,
    assert_empty,
    every_milestone,
    greedy,
    hf_generate,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
    tiny_model,
    word_tokenizer,
)
from m1_single import SamplingParams

PROMPTS = random_prompts([6, 3, 9, 1, 5], seed=1)
OUTPUT = hf_greedy("llama", PROMPTS[0])


# --- what goes in -------------------------------------------------------------------------------


@every_milestone
def test_a_prompt_is_text_or_token_ids_and_one_or_many_may_be_given(package):
    engine = make_engine(package, tokenizer=word_tokenizer())
    ids, text = PROMPTS[0], as_text(PROMPTS[0])
    for prompts in (ids, text, [ids], [text], (tuple(ids),)):
        (output,) = engine.generate(prompts, greedy(3))
        assert output.prompt_token_ids == ids
        assert output.token_ids == OUTPUT[:3]
        assert output.text == as_text(OUTPUT[:3])
    both = engine.generate([text, PROMPTS[1]], greedy(3))
    assert [output.prompt_token_ids for output in both] == PROMPTS[:2]
    assert engine.generate([], greedy(3)) == []
    (without,) = make_engine(package).generate(ids, greedy(3))
    assert (without.text, without.token_ids) == ("", OUTPUT[:3])


@every_milestone
def test_outputs_come_in_the_order_of_prompts_however_they_finish(package):
    lengths = [9, 1, 5, 2, 7]
    engine = make_engine(package, max_num_seqs=2)
    outputs = engine.generate(PROMPTS, [greedy(length) for length in lengths])
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(output.token_ids) for output in outputs] == lengths


@every_milestone
def test_an_id_of_the_engines_own_never_meets_a_given_one(package):
    engine = make_engine(package)
    given = [engine.add_request(PROMPTS[0], greedy(2), request_id=f"r{n}") for n in range(1, 4)]
    own = [engine.add_request(PROMPTS[1], greedy(2)) for _ in range(3)]
    assert len({*given, *own}) == 6
    assert len(run_to_end(engine)) == 6


# --- when it ends -------------------------------------------------------------------------------


@every_milestone
def test_max_tokens_and_max_model_len_end_with_length(package):
    engine = make_engine(package, max_model_len=12)
    outputs = engine.generate([PROMPTS[0], PROMPTS[0], [5] * 11], [greedy(4), greedy(99), greedy()])
    assert [len(output.token_ids) for output in outputs] == [4, 12 - 6, 12 - 11]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert outputs[1].token_ids == OUTPUT[:6]


@every_milestone
def test_a_stop_token_and_eos_end_with_stop_and_are_part_of_the_output(package):
    eos = OUTPUT[4]
    ended = OUTPUT[: OUTPUT.index(eos) + 1]
    model = tiny_model("llama", eos_token_id=eos)  # the same weights
    assert hf_generate(model, PROMPTS[0], 12) == ended
    params = [greedy(12, ignore_eos=False), greedy(12, stop_token_ids=[eos, 0]), greedy(12)]
    *stopped, ignoring = make_engine(package, model).generate([PROMPTS[0]] * 3, params)
    for output in stopped:
        assert (output.token_ids, output.finish_reason) == (ended, "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (OUTPUT, "length")


@every_milestone
def test_a_stop_string_ends_the_text_before_it(package):
    words = as_text(OUTPUT).split()
    stop = f"{words[3][-1:]} {words[4][:2]}"  # from inside one token into the next
    expected = as_text(OUTPUT).partition(stop)[0]
    engine = make_engine(package, tokenizer=word_tokenizer())
    shown = [output.text for output in engine.stream(PROMPTS[0], greedy(12, stop=stop))]
    assert shown[-1] == expected
    assert all(expected.startswith(text) for text in shown)
    (output,) = engine.generate(PROMPTS[0], greedy(12, stop=[stop, "never"]))
    assert (output.text, output.finish_reason) == (expected, "stop")
    assert as_text(output.token_ids).startswith(expected + stop)


@every_milestone
def test_a_stop_string_within_min_tokens_is_ordinary_text(package):
    words = as_text(OUTPUT).split()
    engine = make_engine(package, tokenizer=word_tokenizer())
    params = greedy(12, stop=[words[1], words[3]], min_tokens=3)
    (output,) = engine.generate(PROMPTS[0], params)
    assert (output.text, output.finish_reason) == (" ".join(words[:3]) + " ", "stop")
    assert_empty(engine)


# --- what comes out -----------------------------------------------------------------------------


@every_milestone
def test_logprobs_are_those_of_the_models_distribution(package):
    wanting, other = make_engine(package, tokenizer=word_tokenizer()).generate(
        [PROMPTS[0], PROMPTS[2]], [greedy(4, logprobs=3), greedy(4)]
    )
    assert other.logprobs is None
    sequence = torch.tensor([PROMPTS[0] + OUTPUT[:4]])
    logits = tiny_model()(sequence).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    assert len(wanting.logprobs) == 4
    for token, row, told in zip(OUTPUT, expected, wanting.logprobs, strict=False):
        assert next(iter(told)) == token
        assert sorted(told) == sorted(row.topk(3).indices.tolist())
        for token_id, logprob in told.items():
            assert logprob.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
            assert logprob.rank == 1 + int((row > row[token_id]).sum())


@every_milestone
def test_metrics_tell_when_a_request_waited_started_and_ended(package):
    engine = make_engine(package, max_num_seqs=1)
    start = time.perf_counter()
    first, second = engine.generate(PROMPTS[:2], [greedy(4), greedy(1)])
    end = time.perf_counter()
    for metrics in (first.metrics, second.metrics):
        times = [
            start,
            metrics.arrival_time,
            metrics.first_scheduled_time,
            *metrics.token_times,
            metrics.finish_time,
            end,
        ]
        assert times == sorted(times)
        assert metrics.first_token_time == metrics.token_times[0]
        assert metrics.ttft == metrics.first_token_time - metrics.arrival_time
        assert 0 <= metrics.queue_time < metrics.ttft
    assert second.metrics.first_scheduled_time >= first.metrics.finish_time, "it had to wait"
    times = first.metrics.token_times
    assert len(times) == 4
    assert first.metrics.tpot == pytest.approx((times[3] - times[0]) / 3)
    assert second.metrics.tpot is None, "one token has no time per further token"


@every_milestone
def test_stats_count_what_was_computed(package):
    engine = make_engine(package, max_num_seqs=2)
    assert engine.stats()["useful_share"] == 1.0
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, greedy(3))
    assert (engine.stats()["waiting"], engine.stats()["running"]) == (3, 0)
    engine.step()
    assert (engine.stats()["waiting"], engine.stats()["running"]) == (1, 2)
    run_to_end(engine)
    stats: dict[str, Any] = engine.stats()
    assert stats["prefill_tokens"] == sum(map(len, PROMPTS[:3]))
    assert stats["decode_tokens"] == 3 * (3 - 1)
    assert (stats["steps"], stats["finished"]) == (6, 3)
    assert stats["kv"]["used"] == 0
    assert stats["kv"]["watermark"] > 0
    assert_empty(engine)


def test_a_prompts_text_is_made_when_somebody_asks_and_once(monkeypatch):
    engine = make_engine(PACKAGES[0], tokenizer=word_tokenizer())
    decoded, decode = [], engine.tokenizer.decode

    def note(token_ids: list[int], **options: Any) -> str:
        decoded.append(list(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(engine.tokenizer, "decode", note)
    outputs = list(engine.stream([[7, 12]], greedy(3)))
    assert [7, 12] not in decoded
    assert {output.prompt for output in outputs} == {"w7 w12"}
    assert decoded.count([7, 12]) == 1
    assert engine.generate("w7 w12", greedy(1))[0].prompt == "w7 w12"
    assert make_engine(PACKAGES[0]).generate([7, 12], greedy(1))[0].prompt is None


def test_an_output_that_was_pickled_shows_the_same():
    engine = make_engine(PACKAGES[0], tokenizer=word_tokenizer())
    for output in engine.stream(["w7 w12"], greedy(3, logprobs=2, prompt_logprobs=1)):
        copy = pickle.loads(pickle.dumps(output))
        assert (copy, repr(copy), copy.finished) == (output, repr(output), output.finished)
        assert (copy.logprobs, copy.prompt_logprobs) == (output.logprobs, output.prompt_logprobs)
    assert copy.outputs != engine.generate("w7 w12", greedy(2, logprobs=2))[0].outputs


# --- the same tokens everywhere -----------------------------------------------------------------


def test_a_seeded_sample_is_the_same_in_every_milestone_alone_and_in_a_batch():
    params = SamplingParams(temperature=1.2, top_p=0.95, top_k=60, seed=7, max_tokens=8)
    results = []
    for package in PACKAGES:
        (alone,) = make_engine(package).generate(PROMPTS[0], params)
        engine = make_engine(package, max_num_seqs=3)
        for prompt in PROMPTS[1:]:  # who came before, and shares the batch or not
            engine.add_request(prompt, SamplingParams(max_tokens=5))
        engine.step()
        engine.add_request(PROMPTS[0], params, request_id="seeded")
        results += [alone.token_ids, run_to_end(engine)["seeded"].token_ids]
    assert all(tokens == results[0] for tokens in results)
    assert results[0] != OUTPUT[: len(results[0])], "it is no greedy output"


def test_requests_without_a_seed_differ_and_repeat_with_the_engines_seed():
    def sampled(package: Any, seed: int) -> list[list[int]]:
        engine = make_engine(package, seed=seed)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        return [output.token_ids for output in engine.generate([PROMPTS[0]] * 3, params)]

    first = sampled(PACKAGES[0], seed=0)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert all(sampled(package, seed=0) == first for package in PACKAGES)
    assert sampled(PACKAGES[0], seed=1) != first
