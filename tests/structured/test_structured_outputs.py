"""Structured outputs: texts keep to what was asked for, and tokens are the same everywhere."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from typing import Any

import jsonschema
import pytest

import m1_single
import m2_batching
import m3_paged
import m4_prefix_chunked
import m5_kernels
from helpers.engines import PACKAGES, assert_empty, break_at_call, run_to_end, tiny_model
from helpers.servers import byte_tokenizer
from m1_single import SamplingParams
from milestone_llm.core.errors import InputError
from milestone_llm.structured import StructuredOutputsParams
from milestone_llm.structured.grammars import NICENESS, Grammars, compiling_thread

pytest.importorskip("llguidance", reason="llguidance is not installed")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WANTED: list[dict[str, Any]] = [
    {"choice": ["red", "green", 'the "blue" one']},
    {"regex": r"[0-9]{3}-[a-f]{2,5}"},
    {"json": PERSON},
    {"grammar": 'start: "a" ("b" | "c")~3'},
    {"json": {"enum": ["é", 3, None]}},
]


def engine(package: Any, **fields: Any) -> Any:
    """An engine on a tiny random model whose tokens are bytes."""
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    fields = {"max_model_len": 160, "max_num_seqs": 4, **fields}
    return package.LLMEngine(model, tokenizer=tokenizer, **fields)


def params(wanted: dict[str, Any] | None, **fields: Any) -> SamplingParams:
    """Of a request, with structured outputs or without."""
    structured = wanted and StructuredOutputsParams(**wanted)
    fields = {"temperature": 0.9, "seed": 3, "max_tokens": 60, **fields}
    return SamplingParams(structured_outputs=structured, **fields)


def check(text: str, wanted: dict[str, Any]) -> None:
    """A finished text is what was asked for."""
    ((kind, rule),) = wanted.items()
    if kind == "choice":
        assert text in rule
    elif kind == "regex":
        assert re.fullmatch(rule, text)
    elif kind == "json":
        jsonschema.validate(json.loads(text), rule)
    else:
        assert re.fullmatch("a[bc]{3}", text)


MIXED = [
    params(WANTED[0], temperature=0),
    params(None, max_tokens=20),
    params(WANTED[1], seed=5, top_p=0.9, repetition_penalty=1.2),
    params(WANTED[2], logprobs=2, frequency_penalty=0.5),
    params(WANTED[3], min_tokens=9),
    params(None, temperature=0, max_tokens=12),
    params(WANTED[4], top_k=7, logit_bias={65: 5.0}),
]
PROMPTS = [f"prompt {index}" for index in range(len(MIXED))]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """What each request of MIXED gets of M1, alone."""
    m1 = engine(m1_single)
    return [m1.generate(prompt, each)[0] for prompt, each in zip(PROMPTS, MIXED, strict=True)]


FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((package, {}) for package in PACKAGES),
    (m3_paged, {"block_size": 4, "kv_cache_tokens": 160, "preemption": "recompute"}),
    (m3_paged, {"block_size": 4, "kv_cache_tokens": 160, "preemption": "swap"}),
    (m4_prefix_chunked, {"max_num_batched_tokens": 5, "block_size": 4}),
    (m4_prefix_chunked, {"speculation": "ngram"}),
    (m5_kernels, {"speculation": "ngram"}),
]


@pytest.mark.parametrize(("package", "fields"), FIELDS)
def test_in_any_batch_a_request_gets_its_tokens(
    package: Any, fields: dict[str, Any], alone: list[Any]
) -> None:
    built = engine(package, **fields)
    for got, wanted, given in zip(built.generate(PROMPTS, MIXED), alone, MIXED, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.finish_reason == wanted.finish_reason
        assert given.structured_outputs is None or got.finish_reason == "stop"
    assert_empty(built)


def test_outputs_are_what_was_asked_for(alone: list[Any]) -> None:
    for output, given in zip(alone, MIXED, strict=True):
        if given.structured_outputs is not None:
            asked = vars(given.structured_outputs).items()
            kind, rule = next((kind, rule) for kind, rule in asked if rule is not None)
            check(output.text, {kind: json.loads(rule) if kind == "json" else rule})


def test_completions_have_rules_of_their_own() -> None:
    built = engine(m3_paged)
    given = params(WANTED[1], n=4, temperature=1.5)
    texts = [each.text for each in built.generate("prompt", given)[0].outputs]
    assert len(set(texts)) > 1
    for text in texts:
        check(text, WANTED[1])


def test_forced_tokens_are_guesses_that_come_true() -> None:
    long = {"regex": "the only sentence that there is, (once|twice)"}
    plain, guessing = engine(m4_prefix_chunked), engine(m4_prefix_chunked, speculation="ngram")
    outputs = [each.generate("prompt", params(long))[0].token_ids for each in (plain, guessing)]
    assert outputs[0] == outputs[1]
    assert guessing.stats()["steps"] < plain.stats()["steps"] / 2


def test_a_step_that_fails_costs_no_rule_its_place(alone: list[Any], monkeypatch: Any) -> None:
    built = engine(m4_prefix_chunked)
    break_at_call(monkeypatch, built.runner, "launch", {5}, KeyboardInterrupt())
    built.add_request(PROMPTS[3], MIXED[3], request_id="r")
    with pytest.raises(KeyboardInterrupt):
        run_to_end(built)
    assert run_to_end(built)["r"].text == alone[3].text


def test_a_trace_says_how_many_tokens_were_allowed() -> None:
    built = engine(m2_batching, trace="memory")
    built.generate("prompt", params({"choice": ["ab", "ac", "d"]}, temperature=0))
    first = built.tracer.records[0].batch[0]
    assert first.num_allowed_tokens == 2  # "a" or "d"
    assert "num_allowed_tokens" in built.tracer.records[0].to_dict()["batch"][0]


BAD: list[dict[str, Any]] = [
    {},
    {"regex": "a", "choice": ["b"]},
    {"regex": "(unclosed"},
    {"regex": 3},
    {"choice": []},
    {"choice": "red"},
    {"json": "{"},
    {"json": {"type": "strange"}},
    {"json": {"type": "object", "unevaluatedProperties": False}},
    {"json": [1]},
    {"grammar": "start: missing_rule"},
    {"regex": "a" * 100_001},
]


@pytest.mark.parametrize("wanted", BAD, ids=lambda wanted: str(wanted)[:40])
def test_what_cannot_be_compiled_is_refused(wanted: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    with pytest.raises(InputError):
        grammars.rule_of(params(wanted) if wanted else params({"regex": None}))


def test_what_a_model_cannot_have_is_refused() -> None:
    with pytest.raises(InputError, match="tokenizer"):
        Grammars(None, 9, frozenset([1])).rule_of(params({"regex": "a"}))
    tokenizer = byte_tokenizer()
    with pytest.raises(InputError, match="EOS"):
        Grammars(tokenizer, 9, frozenset()).rule_of(params({"regex": "a"}))
    with pytest.raises(InputError, match="ignore_eos"):
        Grammars(tokenizer, 9, frozenset([1])).rule_of(params({"regex": "a"}, ignore_eos=True))
    with pytest.raises(InputError, match="StructuredOutputsParams"):
        Grammars(tokenizer, 9, frozenset([1])).rule_of(SamplingParams(structured_outputs="a"))


def test_a_rule_that_is_ready_does_not_wait_for_one_that_is_compiled(monkeypatch) -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    ready, other = params({"regex": "a"}), params({"regex": "b"})
    grammars.rule_of(ready)
    begun, may_end, compile = threading.Event(), threading.Event(), grammars._compile

    def slow(wanted: StructuredOutputsParams) -> Any:
        begun.set()
        assert may_end.wait(60)
        return compile(wanted)

    monkeypatch.setattr(grammars, "_compile", slow)
    with compiling_thread() as thread:
        made = thread.submit(grammars.rule_of, other)
        assert begun.wait(60)
        assert grammars.rule_of(ready) is not None  # or this test has no end
        may_end.set()
        assert made.result() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a process's")
def test_a_server_compiles_behind_its_other_threads() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with compiling_thread() as thread:
        assert thread.submit(niceness).result() == min(before + NICENESS, 19)
    assert niceness() == before
