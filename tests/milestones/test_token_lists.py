"""`bad_words` and `allowed_token_ids`, with Hugging Face's processors of logits as the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LogitsProcessorList, NoBadWordsLogitsProcessor

import m4_prefix_chunked
import m5_kernels
from helpers.engines import as_text, every_milestone, hf_generate, tiny_model, word_tokenizer
from m1_single import SamplingParams

PROMPT = [11, 5, 77, 42, 9]
NUM_TOKENS = 10


def oracle(banned: list[list[int]], allowed: list[int] | None) -> list[int]:
    """The greedy continuation of `generate`; a ban begins with the output, as the prompt has no
    token of it."""
    options: dict[str, Any] = {"eos_token_id": 10**6}
    if banned:
        options["logits_processor"] = LogitsProcessorList(
            [NoBadWordsLogitsProcessor(banned, eos_token_id=None)]
        )
    if allowed is not None:
        options["prefix_allowed_tokens_fn"] = lambda batch, ids: allowed
    return hf_generate(tiny_model(), PROMPT, NUM_TOKENS, **options)


def cases() -> list[tuple[list[list[int]], list[int] | None]]:
    """Bans of what would come: a token, the end of a pair, and both within a few tokens."""
    free = oracle([], None)
    odd = list(range(1, 199, 2))
    among_odd = oracle([], odd)
    return [
        ([free[:1]], None),
        ([free[2:4], free[5:6]], None),
        ([], odd),
        ([among_odd[1:3], among_odd[:1]], odd),
    ]


def engine_of(package: Any, **fields: Any) -> Any:
    return package.LLMEngine(
        tiny_model(), tokenizer=word_tokenizer(), max_model_len=64, check_invariants=True, **fields
    )


def check(engine: Any) -> None:
    several, expected = [], []
    for banned, allowed in cases():
        words = [as_text(tokens) for tokens in banned]
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        several.append(SamplingParams(bad_words=words, allowed_token_ids=allowed, **fields))
        expected.append(oracle(banned, allowed))
    several.append(SamplingParams(**fields))  # a free row beside them
    expected.append(oracle([], None))
    outputs = engine.generate([PROMPT] * len(several), several)
    assert [output.token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@every_milestone
def test_greedy_tokens_are_those_of_hugging_face(package):
    check(engine_of(package))


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels])
def test_guessed_tokens_keep_to_the_lists(package):
    check(engine_of(package, speculation="ngram"))


def test_a_pipelined_engine_knows_the_tokens_before():
    check(engine_of(m5_kernels, async_scheduling=True))


@every_milestone
def test_lists_that_leave_no_token_end_one_request_with_an_error(package):
    params = SamplingParams(allowed_token_ids=[5], bad_words=["w5"], max_tokens=3)
    bad, good = engine_of(package).generate([PROMPT] * 2, [params, SamplingParams(max_tokens=3)])
    assert (bad.finish_reason, good.finish_reason in ("length", "stop")) == ("error", True)


@every_milestone
def test_min_tokens_ban_stop_tokens_unless_nothing_else_is_allowed(package):
    stop = {"stop_token_ids": [7], "min_tokens": 3, "max_tokens": 6, "temperature": 0}
    two, one = engine_of(package).generate(
        [PROMPT] * 2,
        [SamplingParams(allowed_token_ids=ids, **stop) for ids in ([7, 8], [7])],
    )
    assert (two.token_ids[:3], one.token_ids) == ([8] * 3, [7])
