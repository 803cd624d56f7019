"""Rows of 1 + k tokens, k of them guessed: not one token differs, and no block is lost.

A `Clairvoyant` in place of n-grams knows what will come and errs now and then, so that guesses are
accepted whole, in part and not at all in everything that a request may ask for.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
import torch

import m4_prefix_chunked
from helpers.engines import (
    assert_empty,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    word_tokenizer,
)
from helpers.read_back import next_token, seed_of
from helpers.schedulers import Life, assert_tokens, prompt, request_of
from m1_single import RequestOutput, SamplingParams
from m4_prefix_chunked.speculation import GuessingRow, draft_token_ids
from m4_prefix_chunked.verification import sample_and_verify
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.request import Request
from milestone_llm.models.tiny_models import VOCAB_SIZE
from milestone_llm.trace.records import StepRecord

MAX_MODEL_LEN = 48


class Clairvoyant:
    """Guesses the tokens that a `ReadBackRunner` will sample."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """What comes."""
        known, seed = list(request.token_ids), seed_of(request.sampling_params, request.index)
        for _ in range(num_tokens):
            known.append(next_token(known, seed))
        return known[len(request.token_ids) :]


class Oracle:
    """Guesses tokens that are known from a run without guesses, some of them spoilt."""

    def __init__(self, outputs: dict[str, list[int]], error_rate: float = 0.0) -> None:
        self.outputs, self.error_rate, self.rng = outputs, error_rate, random.Random(0)

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """What comes, with errors; behind the end anything."""
        behind = self.outputs[request.request_id][request.num_output_tokens :] + [7] * num_tokens
        return [
            self.rng.randrange(VOCAB_SIZE) if self.rng.random() < self.error_rate else token
            for token in behind[:num_tokens]
        ]


def work(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all kinds, some with equal beginnings."""
    beginning = random_prompts([16], seed=rng.randrange(3))[0]
    prompts, params = [], []
    for index in range(7):
        own = random_prompts([rng.randint(1, 12)], seed=rng.randrange(99))[0]
        prompts.append(rng.choice([[], beginning]) + own)
        max_tokens = rng.choice([1, 2, 8, 30, 60])
        stop = [f"w{rng.randrange(VOCAB_SIZE)}" for _ in range(6)]
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 0, 0.7, 1.3]),
                top_p=rng.choice([1, 0.9]),
                top_k=rng.choice([0, 20]),
                seed=index,
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, max_tokens // 2]),
                repetition_penalty=rng.choice([1, 1, 1.5]),
                frequency_penalty=(0, 0, 1.1)[index % 3],
                presence_penalty=(0, -0.7)[index % 2],
                logit_bias={5: 3.5, 9: -100} if index == 4 else {},
                stop=rng.choice([[], stop]),
                stop_token_ids=rng.choice([[], [rng.randrange(VOCAB_SIZE) for _ in range(6)]]),
                ignore_eos=rng.random() < 0.5,
                logprobs=rng.choice([None, None, 3]),
                prompt_logprobs=rng.choice([None, None, 2]),
                n=rng.choice([1, 1, 1, 3]),
            )
        )
    return prompts, params


def facts(output: RequestOutput) -> Any:
    """All that a caller sees of a request, log-probabilities rounded."""
    rounded = lambda entry: {k: (round(v.logprob, 6), v.rank) for k, v in entry.items()}  # noqa: E731
    return [
        [rounded(entry) for entry in (output.prompt_logprobs or [None])[1:]],
        [
            (
                each.token_ids,
                each.text,
                each.finish_reason,
                [rounded(entry) for entry in each.logprobs or []],
            )
            for each in output.outputs
        ],
    ]


def spec_engine(oracle: Any = None, **fields: Any) -> Any:
    """An engine that speculates; with n-grams, or what an oracle says."""
    fields = {"max_model_len": MAX_MODEL_LEN, "block_size": 4, "speculation": "ngram", **fields}
    engine = make_engine(m4_prefix_chunked, **fields)
    if oracle is not None:
        engine.scheduler.speculation.proposer = oracle
    return engine


def test_a_block_that_a_row_fills_and_another_reads_is_not_copied_for_drafts():
    """`b` was preempted and comes back in the step in which `a` fills the last block of both."""
    life = Life(16, speculation="ngram")
    a, b = (request_of(name, prompt("A", 1), max_tokens=9) for name in "ab")
    life.add(a)
    life.scheduler.speculation.max_rows = 0  # no drafts yet
    while a.num_tokens < 8:
        life.plan()
    life.scheduler.speculation.max_rows, life.scheduler.speculation.proposer = 9, Clairvoyant()
    seed = seed_of(a.sampling_params, 0)
    b.token_ids += [*a.output_token_ids, next_token(a.token_ids, seed)]
    b.num_preemptions = 1
    life.scheduler.waiting.add(b)
    plan = life.plan()
    assert [(row.start, len(draft_token_ids(row))) for row in plan.rows] == [(7, 3), (8, 3)]
    assert not plan.copies
    life.run()
    assert_tokens([a, b])


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_asked_for_every_request_gets_what_it_gets_without_guesses(seed):
    rng = random.Random(seed)
    prompts, params = work(rng)
    common = {"tokenizer": word_tokenizer(), "max_num_seqs": 6}
    wanted = spec_engine(speculation=None, **common).generate(prompts, params)
    known = {
        output.request_id + (f"/{each.index}" if each.index else ""): each.token_ids
        for output in wanted
        for each in output.outputs
    }
    engine = spec_engine(
        oracle=Oracle(known, error_rate=rng.choice([0, 0.1, 0.3])),
        num_speculative_tokens=rng.choice([1, 3, 7]),
        max_num_batched_tokens=rng.choice([5, 13, 64]),
        kv_cache_tokens=rng.choice([MAX_MODEL_LEN, 2 * MAX_MODEL_LEN, 1000]),
        preemption=rng.choice(["recompute", "swap"]),
        enable_prefix_caching=rng.random() < 0.7,
        prefill_policy=rng.choice(["mixed", "prefill_first"]),
        **common,
    )
    assert list(map(facts, engine.generate(prompts, params))) == list(map(facts, wanted))
    assert_empty(engine)


PROMPT = random_prompts([5], seed=2)[0]


def test_what_was_accepted_behind_a_stop_token_is_dropped():
    known = hf_greedy("llama", PROMPT, 12)
    stop = next(token for token in known[3:] if token not in known[:3])
    engine = spec_engine(oracle=Oracle({"a": known}), num_speculative_tokens=12)
    engine.add_request(PROMPT, greedy(12, stop_token_ids=[stop]), "a")
    first, last = engine.step() + engine.step()
    assert first.token_ids == known[:1]
    assert (last.finish_reason, last.token_ids) == ("stop", known[: known.index(stop) + 1])
    assert_empty(engine)


# --- budget, memory and luck ---------------------------------------------------------------------


class Same:
    """Guesses a token as often as it may, and notes how often it was asked."""

    def __init__(self, token_id: int = 1) -> None:
        self.token_id = token_id
        self.asked: list[str] = []

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        self.asked.append(request.request_id)
        return [self.token_id] * num_tokens


def life(*args: Any, proposer: Any, num_tokens: int = 3, **fields: Any) -> Life:
    made = Life(*args, speculation="ngram", **fields)
    made.scheduler.speculation.proposer = proposer
    made.scheduler.speculation.num_tokens = num_tokens
    return made


def row_lengths(life: Life) -> list[int]:
    """Tokens of the rows of the next step, guesses included."""
    plan = life.scheduler.schedule()
    lengths = [row.num_new_tokens for row in plan.rows]
    life.scheduler.update(plan, life.device.run(plan))
    life.scheduler.check_invariants()
    return lengths


def test_a_row_costs_its_guesses_and_every_running_request_comes_first():
    made = life(20, proposer=Same(), max_num_batched_tokens=6)
    made.add(*(request_of(name, [number], 9) for number, name in enumerate("abc")))
    assert row_lengths(made) == [1, 1, 1]
    assert row_lengths(made) == [4, 1, 1]  # a guesses what the budget of 6 leaves


def test_nobody_is_preempted_for_a_guess():
    """Four blocks of two: both requests get their token, and no guess finds room."""
    made = life(4, 2, proposer=Same(), max_model_len=8)
    made.add(request_of("a", [1, 2, 3], 4), request_of("b", [4, 5, 6], 4))
    assert row_lengths(made) == [3, 3]
    assert row_lengths(made) == [1, 1]
    assert made.scheduler.kv.preempter.num_preemptions == 0


def test_no_guess_is_made_in_a_step_that_preempts():
    made = life(4, 2, proposer=Same(), max_model_len=8)
    made.add(request_of("a", [1, 2, 3, 4], 4), request_of("b", [4, 5, 6, 7], 4))
    assert row_lengths(made) == [4, 4]
    asked = len(made.scheduler.speculation.proposer.asked)
    assert row_lengths(made) == [1]
    assert made.scheduler.kv.preempter.num_preemptions == 1
    assert len(made.scheduler.speculation.proposer.asked) == asked


def test_a_block_that_a_wrong_guess_filled_is_not_found():
    """The request ends by the token that takes the guess's place, and its last block is full.

    Tokens 0 to 3 are known when it ends, but the KV of token 3 is that of the guess.
    """
    made = life(8, 4, proposer=Same())
    first = request_of("a", [1, 2], 2)
    made.run(first)
    assert len(first.token_ids) == 4
    second = request_of("b", [*first.token_ids, 9], 1)
    made.add(second)
    assert made.scheduler.kv.prefix_cache.find(second).num_tokens == 0
    made.run()


def test_whose_guesses_fail_rests_longer_each_time():
    made = life(200, proposer=Same(), max_model_len=600)
    made.add(request_of("a", [1], 200))
    lengths = [row_lengths(made)[0] for _ in range(150)]
    steps = [step for step, length in enumerate(lengths) if length > 1]
    assert steps == [1, 2, 3, 5, 9, 17, 33, 65, 97, 129]


def test_a_place_without_a_token_ends_the_request_behind_what_was_accepted():
    """Logits hold a NaN behind the first guess: `error`, with the tokens before it."""
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, 5], logits[1, 7] = 1, torch.nan
    request = Request("r", [3], SamplingParams(temperature=0))
    row = GuessingRow.of(ScheduledRequest(request, 0, num_new_tokens=1), [5])
    tokens = sample_and_verify([row], logits)["r"]
    assert [token.token_id for token in tokens] == [5, -1]


def test_as_many_rows_guess_as_leave_arithmetic_idle_unless_a_number_is_given():
    config = m4_prefix_chunked.EngineConfig(max_num_seqs=100)
    assert config.on_device("cuda", ("max_num_seqs",)).num_rows_that_guess == 64
    seven = dataclasses.replace(config, num_speculative_tokens=7)
    assert seven.on_device("cuda", ("max_num_seqs",)).num_rows_that_guess == 32
    assert config.on_device("cpu", ()).num_rows_that_guess == 4
    given = dataclasses.replace(config, speculation_max_num_seqs=60)
    assert given.on_device("cpu", ()).num_rows_that_guess == 60
    engine = spec_engine(oracle=Same(), trace="memory", max_num_seqs=6)
    engine.generate(random_prompts([3] * 6), [greedy(length) for length in (4, 5, 6, 12, 13, 14)])
    for record in engine.tracer.records:
        assert len(record.batch) <= 4 or not any(row.num_draft_tokens for row in record.batch)
    assert engine.stats()["spec_decode_num_drafts"] > 0


# --- what is told of guesses ---------------------------------------------------------------------


def test_records_and_counts_tell_guesses_from_tokens():
    """Eight tokens: one by the prompt; three guesses of which one is right; then four are."""
    known = hf_greedy("llama", PROMPT, 8)

    wrong_places = [1, -1]

    class Scripted:
        def propose(self, request: Request, num_tokens: int) -> list[int]:
            guesses = known[request.num_output_tokens :][:num_tokens]
            wrong = wrong_places.pop(0)
            return [token if place != wrong else 0 for place, token in enumerate(guesses)]

    engine = spec_engine(trace="memory", num_speculative_tokens=4)
    engine.scheduler.speculation.proposer = Scripted()
    assert engine.generate(PROMPT, greedy(8))[0].token_ids == known
    rows = [record.batch[0] for record in engine.tracer.records]
    told = [(row.num_draft_tokens, row.num_accepted_tokens, row.num_new_tokens) for row in rows]
    assert told == [(0, 0, 5), (4, 1, 2), (4, 4, 5)]
    assert [row.phase for row in rows] == ["prefill", "decode", "decode"]
    assert [row.start for row in rows] == [0, 5, 7]
    assert [row.sampled_token for row in rows] == [known[0], known[2], known[7]]
    assert [record.num_padding_tokens for record in engine.tracer.records] == [0, 3, 0]
    for record in engine.tracer.records:
        assert StepRecord.from_json(json.dumps(record.to_dict())) == record
    assert "num_draft_tokens" not in engine.tracer.records[0].to_dict()["batch"][0]
    stats = engine.stats()
    assert {name: stats[name] for name in stats if name.startswith("spec_decode")} == {
        "spec_decode_num_drafts": 2,
        "spec_decode_num_draft_tokens": 8,
        "spec_decode_num_accepted_tokens": 5,
        "spec_decode_num_accepted_tokens_per_pos": [2, 1, 1, 1],
    }
    assert stats["decode_tokens"] == 7
