"""Structured outputs: texts keep to what was asked for, and tokens are the same everywhere."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import sys
import threading
from typing import Any

import jsonschema
import pytest
import regex

from engine_helpers import assert_empty, tiny_model
from m1_single import SamplingParams
from milestone_llm.core.errors import InputError
from milestone_llm.structured import StructuredOutputsParams
from milestone_llm.structured.grammars import NICENESS, Grammars, compiling_thread
from serving_helpers import byte_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")

PACKAGES = ["m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels"]
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


def engine(package: str, **fields: Any) -> Any:
    """An engine on a tiny random model whose tokens are bytes."""
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    fields = {"max_model_len": 160, "max_num_seqs": 4, **fields}
    return importlib.import_module(package).LLMEngine(model, tokenizer=tokenizer, **fields)


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
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
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
    m1 = engine("m1_single")
    return [m1.generate(prompt, each)[0] for prompt, each in zip(PROMPTS, MIXED, strict=True)]


FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((package, {}) for package in PACKAGES),
    ("m3_paged", {"block_size": 4, "kv_cache_tokens": 160, "preemption": "recompute"}),
    ("m3_paged", {"block_size": 4, "kv_cache_tokens": 160, "preemption": "swap"}),
    ("m4_prefix_chunked", {"max_num_batched_tokens": 5, "block_size": 4}),
    ("m4_prefix_chunked", {"speculation": "ngram"}),
    ("m5_kernels", {"speculation": "ngram"}),
]


@pytest.mark.parametrize(("package", "fields"), FIELDS)
def test_in_any_batch_a_request_gets_its_tokens(
    package: str, fields: dict[str, Any], alone: list[Any]
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
    built = engine("m3_paged")
    given = params(WANTED[1], n=4, temperature=1.5)
    texts = [each.text for each in built.generate("prompt", given)[0].outputs]
    assert len(set(texts)) > 1
    for text in texts:
        check(text, WANTED[1])


def test_forced_tokens_are_guesses_that_come_true() -> None:
    long = {"regex": "the only sentence that there is, (once|twice)"}
    plain, guessing = engine("m4_prefix_chunked"), engine("m4_prefix_chunked", speculation="ngram")
    outputs = [each.generate("prompt", params(long))[0].token_ids for each in (plain, guessing)]
    assert outputs[0] == outputs[1]
    assert guessing.stats()["steps"] < plain.stats()["steps"] / 2


def test_a_step_that_fails_costs_no_rule_its_place(alone: list[Any]) -> None:
    built = engine("m4_prefix_chunked")
    built.add_request(PROMPTS[3], MIXED[3], request_id="r")
    for _ in range(4):
        built.step()
    launch = built.core.runner.launch

    def interrupted(plan: Any) -> Any:
        launch(plan)
        raise KeyboardInterrupt

    built.core.runner.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        built.step()
    built.core.runner.launch = launch
    while built.has_unfinished_requests():
        outputs = built.step()
    assert outputs[0].text == alone[3].text


def test_a_trace_says_how_many_tokens_were_allowed() -> None:
    built = engine("m2_batching", trace="memory")
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


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose shortest texts are short: unions, patterns, bounds, recursion, unicode."""
    kind = draw.choice(
        ["integer", "number", "string", "boolean", "null", "enum", "const", "pattern"]
        + (["object", "array", "anyOf", "recursion"] if depth < 2 else [])
    )
    if kind == "integer":
        low = draw.randrange(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + draw.randrange(9)}
    if kind == "number":
        return {"type": kind, "minimum": 0, "maximum": draw.randrange(1, 9)}
    if kind == "string":
        return {"type": kind, "maxLength": draw.randrange(4)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": draw.sample(["é", "日本", 3, -1.5, True, None, "a\nb", ""], 3)}
    if kind == "const":
        return {"const": draw.choice([7, "x", {"a": [1]}, []])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-c]{1,2}$", "^x?y$", "^é$"])}
    if kind == "array":
        return {"type": kind, "items": random_schema(draw, depth + 1), "maxItems": 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
    if kind == "recursion":
        node = {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/node"}}
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"} if not depth else {"const": 1}
    names = draw.sample(["a", "b", "ü"], draw.randrange(3))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth + 1) for name in names},
        "required": names[:1],
        "additionalProperties": False,
    }


def test_random_schemas() -> None:
    count, draw = 300, random.Random(7)
    schemas = [random_schema(draw) for _ in range(count)]
    given = [
        params({"json": schema}, temperature=draw.choice([0, 0.7, 1, 2]), seed=draw.randrange(99))
        for schema in schemas
    ]
    built = engine("m4_prefix_chunked", max_num_seqs=16)
    outputs = built.generate(["prompt"] * count, given)
    finished = [
        pair for pair in zip(outputs, schemas, strict=True) if pair[0].finish_reason == "stop"
    ]
    assert len(finished) > count / 2
    for output, schema in finished:
        jsonschema.validate(json.loads(output.text), schema)
    assert {each.finish_reason for each in outputs} <= {"stop", "length"}


def can_become_json(text: str) -> bool:
    """Whether some short ending, with the brackets that are open, makes a JSON value of a text."""
    brackets, is_string, is_escaped = "", False, False
    for letter in text:
        if is_string:
            is_string = is_escaped or letter != '"'
            is_escaped = letter == "\\" and not is_escaped
        elif letter in '"{[':
            is_string = letter == '"'
            brackets += {"{": "}", "[": "]"}.get(letter, "")
        elif letter in "}]":
            brackets = brackets[:-1]
    words = [word[start:] for word in ("true", "false", "null") for start in range(1, len(word))]
    strings = ["0" * count + '"' for count in range(5)] + ['\\"', 'n"']
    values = ["", "0", *words, *strings]
    endings = [*values, "1", ":0", '"":0', *(f"{each}:0" for each in strings)]
    for ending in endings:
        try:
            json.loads(text + ending + brackets[::-1])
        except ValueError:
            continue
        return True
    return False


def test_what_ends_by_length_begins_a_match_or_some_json() -> None:
    """Of JSON only the syntax is checked, and not that its beginning can become valid."""
    rules = [
        {"regex": "the (long|short) [a-z]{3,9}[0-9]{4}"},
        {"choice": ["reddish brown", "red (dark)", "green as grass"]},
        {"json": PERSON},
        {"json": {"type": "array", "minItems": 2, "items": {"enum": ["é\n", None, -15, True]}}},
    ]
    given = [
        params(rule, max_tokens=length, seed=length, temperature=1.2)
        for rule in rules
        for length in range(1, 12)
    ]
    wanted = [rule for rule in rules for _ in range(1, 12)]
    outputs = engine("m2_batching", max_num_seqs=16).generate(["prompt"] * len(given), given)
    assert {output.finish_reason for output in outputs} == {"length"}
    for output, rule in zip(outputs, wanted, strict=True):
        text = output.text.rstrip("\N{REPLACEMENT CHARACTER}")  # half of a letter
        if "json" in rule:
            assert can_become_json(text), text
        else:
            texts = "|".join(map(re.escape, rule.get("choice", [])))
            assert regex.fullmatch(rule.get("regex", texts), text, partial=True), text
    assert not can_become_json("[1}")
