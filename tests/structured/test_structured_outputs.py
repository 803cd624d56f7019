"""Structured outputs: texts keep to what was asked for, and tokens are the same everywhere."""

from __future__ import annotations

import json
import re
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
from milestone_llm.structured.grammars import Grammars, compiling_threads
from milestone_llm.structured.sources import MAX_BLANKS

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


TOKENIZER = byte_tokenizer()
WORD = {"type": "string"}


def engine(package: Any, **fields: Any) -> Any:
    """An engine on a tiny random model whose tokens are bytes."""
    model = tiny_model("llama", vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    fields = {"max_model_len": 160, "max_num_seqs": 4, **fields}
    return package.LLMEngine(model, tokenizer=byte_tokenizer(), **fields)


def new_grammars(**options: Any) -> Grammars:
    """Grammars of that model, none of them compiled."""
    return Grammars(TOKENIZER, len(TOKENIZER), frozenset([TOKENIZER.eos_token_id]), **options)


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


FIELDS: list[tuple[Any, dict[str, Any]]] = [
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


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["<s>old</s>"]}, "<s>old</s>"),
    ({"regex": "x</s>y"}, "x</s>y"),
    ({"json": {"const": "</s>"}}, '"</s>"'),
    ({"grammar": 'start: "<" "pad" ">"'}, "<pad>"),
    ({"grammar": 'root ::= "</s>" "</s>"'}, "</s></s>"),
]
"""Rules with names of special tokens, and the only text that each allows."""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_special_tokens_name_is_spelled_with_ordinary_tokens(package: Any) -> None:
    given = [params(rule) for rule, _ in NAMED]
    outputs = engine(package).generate(["prompt"] * len(NAMED), given)
    got = [(output.text, output.finish_reason) for output in outputs]
    assert got == [(text, "stop") for _, text in NAMED]


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels])
def test_draft_tokens_spell_a_special_tokens_name(package: Any) -> None:
    rule = {"choice": ["the name is </s>, and here it ends"]}
    (output,) = engine(package, speculation="ngram").generate("the name is", params(rule))
    assert (output.text, output.finish_reason) == (rule["choice"][0], "stop")


FAILING: list[tuple[dict[str, Any], str]] = [
    ({"grammar": 'root ::= "a"{1000000000}'}, "a+"),  # "Too many items"
    ({"choice": ["ab\u65e5", "ab\u65e6"]}, "ab"),  # the tokenizer has no such bytes
]
"""Rules that fail amid an output, and the text before."""


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("rule", "before"), FAILING, ids=["gives up", "no tokens"])
def test_a_rule_that_fails_ends_its_request(package: Any, rule: Any, before: str) -> None:
    built = engine(package)
    broken, free = built.generate(["a", "b"], [params(rule), params(None, max_tokens=9)])
    assert broken.finish_reason == "error"
    assert re.fullmatch(before, broken.text)
    assert free.finish_reason == "length"
    assert_empty(built)


def test_only_after_a_wrong_draft_token_everything_is_allowed() -> None:
    rule = new_grammars().rule_of(params({"choice": ["abc"]}))
    assert rule is not None
    a, b, x = TOKENIZER.encode("abx", add_special_tokens=False)
    assert (rule.bits([a, x, b], 1) == -1).all()
    assert not rule.bits([a, x, b], 2).any()
    assert not rule.bits([x]).any()
    rule.bits([a])
    assert rule.num_allowed == 1


def test_forced_tokens_end_before_a_special_tokens_name() -> None:
    rule = new_grammars().rule_of(params({"choice": ["ab</s>c"]}))
    assert rule is not None
    forced = rule.continuation([], [], 9)
    assert TOKENIZER.decode(forced) == "ab"
    guesses = TOKENIZER.encode("<", add_special_tokens=False)
    assert rule.continuation(forced, guesses, 9) == guesses


LIST = {"type": "array", "items": {"$ref": "#"}}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a~1%25"}}}
ENDLESS: list[dict[str, Any]] = [
    {"grammar": 'start: "a" start'},
    {"grammar": 'root ::= "a" b-c\nb-c ::= root+ | ("d" | "e") root'},
    {"grammar": 'start: "a" (b | "c" start)\n?b[capture]: start~2..3 // d\n  | "x"? start -> e'},
    {"grammar": 'start: "a" {1,2} start [B] %json {"type": "null"}\nB: "b" | B2\nB2: "c"'},
    {"json": {**LIST, "minItems": 1}},
    {"json": {"anyOf": [{**LIST, "minItems": 2}, {"allOf": [True, {"$ref": "#"}]}]}},
    {"json": {"$defs": {"a/%": {**NODE, "required": ["next"]}}, **NODE, "required": ["next"]}},
    {"json": {"type": "array", "prefixItems": [1, {"$ref": "#"}], "minItems": 2}},
    {"grammar": 'start: "a" | %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1}'},
]
"""No text of these ends."""
ENDING: list[dict[str, Any]] = [
    {"grammar": 'start: "a" start | "b"'},
    {"grammar": 'root ::= "a" (root | "b")? c{0,3}\nc ::= "d" root'},
    {"grammar": 'start: "a" (b | "c" start)\n!b: ("x".."z")~1..2 -> d\n  | start // c\n  | start?'},
    {"grammar": 'start: b c-d\nb[capture]: [start] "e"\n%ignore /[ ]/\nc-d: /x\\// | c-d'},
    {"json": LIST},
    {"json": {**LIST, "type": ["array", "null"], "minItems": 1}},
    {"json": {"anyOf": [{"$ref": "#"}, {"type": "string"}]}},
    {
        "json": {
            "$defs": {"a/%": {**NODE, "type": ["object", "null"]}},
            **NODE,
            "required": ["next"],
        }
    },
    {"json": {"type": "array", "prefixItems": [{"const": 1}, LIST], "minItems": 1}},
]


@pytest.mark.parametrize("wanted", ENDING, ids=lambda wanted: str(wanted)[:40])
def test_rules_that_call_themselves_are_taken_if_a_text_ends(wanted: dict[str, Any]) -> None:
    assert new_grammars().rule_of(params(wanted)) is not None


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
    {"grammar": ""},
    {"grammar": 'x: "a"'},
    {"grammar": "root ::= ("},
    {"grammar": "root ::= missing"},
    {"grammar": "start: %json {"},
    {"grammar": "root ::= " + "(" * 5_000},
    {"json": {"$ref": "#"}},
    {"json": {"allOf": [{"$ref": "#"}]}},
    {"grammar": "root ::= root"},
    {"grammar": "start: A\nA: /a+/ & /b+/"},
    *ENDLESS,
    {"choice": ["\u65e5"]},  # the tokenizer has no such bytes
    {"regex": "\ud800"},
    {"choice": ["\ud800"]},
    {"grammar": 'start: "\ud800"'},
    {"json": {"const": "\ud800"}},
    {"choice": 5},
    {"regex": "a" * 100_001},
]


@pytest.mark.parametrize("wanted", BAD, ids=lambda wanted: str(wanted)[:40])
def test_what_cannot_be_compiled_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        new_grammars().rule_of(params(wanted) if wanted else params({"regex": None}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "integer", "multipleOf": 99_999_989}},
        {"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 0.1009}]}},
        {"json": {"properties": {str(n): {"multipleOf": 997, "minimum": n} for n in range(99)}}},
        {"grammar": 'start: "multipleOf" %json {"multip\\u006ceOf": 99999989}'},
    ],
    ids=["large", "two", "many", "in Lark"],
)
def test_multiples_that_would_explode_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="remainders"):
        new_grammars().rule_of(params(wanted))


CHANGED: list[Any] = [
    {"enum": ["a", [{"id": 1234567890123456789}]]},
    {"const": 123456789.12345679},
    {"minimum": 2**53 + 1},
    {"type": "integer", "minimum": 10**20, "maximum": 10**20 + 5},
    {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 5},  # it ended the process
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.75},
    {"allOf": [{"type": "number", "exclusiveMaximum": -1}, {"minimum": -1.5}]},
]
"""Schemas with numbers that llguidance would change."""


@pytest.mark.parametrize("schema", CHANGED, ids=str)
def test_numbers_that_a_grammar_would_change_are_refused(schema: Any) -> None:
    with pytest.raises(InputError, match="grammar does not"):
        new_grammars().rule_of(params({"json": schema}))


@pytest.mark.parametrize(
    ("patterns", "is_refused"),
    [
        ({"^a$": {}}, True),
        ({"^a$": {}, "^b$": {}}, True),
        ({"^[ab]$": {}, "^c$": {}}, False),
        ({"^a": {}}, False),
        ({"^c": False}, False),
    ],
)
def test_patterns_that_leave_no_other_name_are_refused(patterns: Any, is_refused: bool) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "patternProperties": patterns}
    wanted = {"json": {"type": "array", "items": {**schema, "additionalProperties": False}}}
    if is_refused:
        with pytest.raises(InputError, match="patternProperties"):
            new_grammars().rule_of(params(wanted))
    else:
        new_grammars().rule_of(params(wanted))
    new_grammars().rule_of(params({"json": schema}))


def takes(schema: Any, text: str) -> bool:
    """Return whether an output that matches a schema may begin with a text."""
    rule = new_grammars().rule_of(params({"json": schema}))
    assert rule is not None
    return bool(rule.bits(TOKENIZER.encode(text, add_special_tokens=False)).any())


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "null"}}},
        {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        {"patternProperties": {"a": {"type": "null"}}, "description": "\x1b"},
        {"properties": {"a": {"type": "null"}, "c": {"const": r"\u0001"}}},
    ],
)
def test_a_name_is_not_spelled_so_that_another_schema_holds(schema: Any) -> None:
    assert takes(schema, '{"a":n')
    assert takes(schema, '{"b":1')
    assert not takes(schema, '{"a":1')
    assert not takes(schema, '{"\\u0061":1')


def test_characters_that_need_the_escape_u_are_refused_in_values() -> None:
    for schema in ({"const": "\x1b"}, {"properties": {"a": {"enum": ["b", ["\x7f"]]}}}):
        with pytest.raises(InputError, match=r"(const|enum): .*\\x(1b|7f)"):
            takes(schema, "")
    assert takes({"const": "\n\x80é"}, '"\\n\x80é"')
    assert takes({"const": {"\x1b": 1}}, '{"\\u001b":1}')


def test_no_option_of_a_schema_allows_the_escape_u() -> None:
    options = {"json_allowed_escapes": "u", "json_allow_general_unicode_escapes": True}
    schema = {"properties": {"a": {"type": "null"}}}
    for name, value in options.items():
        own = {**schema, "x-guidance": {name: value}}
        for wanted in ({"json": own}, {"grammar": f"start: %json {json.dumps(own)}"}):
            with pytest.raises(InputError, match=f"x-guidance has no option '{name}'"):
                new_grammars().rule_of(params(wanted))
        inner = {"type": "array", "items": own}  # llguidance does not read it there
        assert takes(inner, '[{"b')
        assert not takes(inner, '[{"\\u0061')


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "array", "items": {**WORD, "pattern": "^\x01$"}, "minItems": 1}},
        {
            "json": {
                "type": "object",
                "properties": {"a": {**WORD, "pattern": r"\u001b"}},
                "required": ["a"],
            }
        },
        {"regex": "a\x01b"},
        {"grammar": r'start: "a" /\x01/'},
    ],
    ids=str,
)
def test_what_needs_a_character_that_cannot_be_written_has_no_end(wanted: dict[str, Any]) -> None:
    (output,) = engine(m1_single).generate("prompt", params(wanted))
    assert output.finish_reason == "error"


def test_a_schema_as_text_has_a_name_once() -> None:
    schema = '{"properties": {"a": {}, "\\u0061": {"type": "null"}}}'
    with pytest.raises(InputError, match="the name 'a' twice"):
        StructuredOutputsParams(json=schema)
    with pytest.raises(InputError, match="the name 'a' twice"):
        new_grammars().rule_of(params({"grammar": f"start: %json {schema}"}))


def test_names_that_could_be_counted_twice_are_refused() -> None:
    ab = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    for schema in ({"minProperties": 2}, {**ab, "minProperties": 4}):
        with pytest.raises(InputError, match="minProperties"):
            takes({"type": "array", "items": schema}, "[")
    lenient = {"minProperties": 2, "x-guidance": {"lenient": True}}
    for schema in ({"minProperties": 1}, {**ab, "minProperties": 3}, lenient):
        assert takes(schema, "{")


def test_a_regex_with_too_many_parts_is_refused() -> None:
    new_grammars().rule_of(params({"regex": "a?" * 1000 + "b" * 20_000}))
    for count in (10_000, 30_000):
        with pytest.raises(InputError, match="too many parts: at most 100,000"):
            new_grammars().rule_of(params({"regex": "a?" * count}))


def test_ordinary_numbers_are_taken() -> None:
    grammars = new_grammars()
    for schema in (
        {"enum": [0.1, -2.5e-7, 10**18, 2**53, 3.14159265358979]},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"properties": {"a": {"exclusiveMinimum": 0}, "minimum": {"maximum": 0.5}}},
    ):
        assert grammars.rule_of(params({"json": schema})) is not None


def test_a_grammar_may_be_deep() -> None:
    rules = "".join(f"a{n}: a{n + 1}\n" for n in range(5000))  # it ended the process
    rule = new_grammars().rule_of(params({"grammar": f'start: a0\n{rules}a5000: "x"'}))
    assert rule is not None


def test_errors_do_not_print_the_grammar() -> None:
    schema = {"properties": {"a": {"type": "strange"}}}
    with pytest.raises(InputError, match=r"Invalid type: strange$"):
        new_grammars().rule_of(params({"grammar": f"start: %json {json.dumps(schema)}"}))
    rule = new_grammars().rule_of(
        params({"grammar": " | ".join(['start: "ab"'] + 9999 * ['"ab"'])})
    )
    assert rule is not None
    rule.bits(TOKENIZER.encode("a", add_special_tokens=False))
    assert rule.problem is not None
    assert '"ab"' not in rule.problem


def test_what_matches_nothing_is_refused_also_with_several_eos_tokens() -> None:
    with pytest.raises(InputError, match="no text"):
        Grammars(TOKENIZER, len(TOKENIZER), frozenset([1, 2])).rule_of(
            params({"regex": "[^\\s\\S]"})
        )


def test_ordinary_multiples_are_taken() -> None:
    grammars = new_grammars()
    price = {"type": "number", "multipleOf": 0.01}
    for schema in (price, {"properties": {"a": price, "multipleOf": {"multipleOf": 1000}}}):
        assert grammars.rule_of(params({"json": schema})) is not None


@pytest.mark.parametrize(
    "wanted",
    [
        {"json_object": True},
        {"json": {"type": "array"}},
        {"json": {"type": "array", "x-guidance": {"lenient": True}}},
        {"grammar": "start: %json {}"},
        {"grammar": 'start: "%json {" | /%json \\{/ | %json {} // %json {'},
    ],
)
def test_json_has_few_blanks_between_two_tokens(wanted: dict[str, Any]) -> None:
    grammars = new_grammars()
    begin = "{" if "json_object" in wanted else "["

    def is_taken(text: str) -> bool:
        rule = grammars.rule_of(params(wanted))
        token_ids = TOKENIZER.encode(text, add_special_tokens=False)
        return rule is not None and bool(rule.bits(token_ids).any())

    assert is_taken(begin + "\n" + " " * (MAX_BLANKS - 1))
    assert not is_taken(begin + "\n" + " " * MAX_BLANKS)


def test_a_schema_may_allow_blanks_without_limit() -> None:
    rule = new_grammars().rule_of(params({"json": {"x-guidance": {"whitespace_flexible": True}}}))
    assert rule is not None
    assert rule.bits(TOKENIZER.encode("[" + " " * 99, add_special_tokens=False)).any()


def test_a_lenient_schema_loses_what_cannot_be_compiled(caplog: pytest.LogCaptureFixture) -> None:
    word = {"type": "string", "pattern": "^(?=a)"}
    data = {"properties": {"pattern": word}, "patternProperties": {"(?=b)": {}, "c": word}}
    schema = {**data, "uniqueItems": True, "x-guidance": {"lenient": True}}
    grammars = new_grammars()
    for wanted in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        caplog.clear()
        assert grammars.rule_of(params(wanted)) is not None
        assert all(each in caplog.text for each in ("(?=a)", "(?=b)", "uniqueItems"))
        assert "'c'" not in caplog.text
    with pytest.raises(InputError):
        grammars.rule_of(params({"json": data}))
    caplog.clear()
    new_grammars(is_logged=False).rule_of(params({"json": schema}))
    assert not caplog.text


def test_a_lenient_schema_keeps_what_only_looks_like_a_pattern() -> None:
    schema = {"const": {"pattern": "(?=a)"}, "x-guidance": {"lenient": True}}
    (output,) = engine(m1_single).generate("prompt", params({"json": schema}))
    assert json.loads(output.text) == schema["const"]


def test_a_choice_may_have_any_characters() -> None:
    text = '\n\\"/é'
    wanted = {"choice": [text, "\x7f"]}  # no token spells the second
    (output,) = engine(m1_single).generate("prompt", params(wanted))
    assert output.text == text


def test_the_same_text_as_a_regex_and_as_a_grammar_is_two_rules() -> None:
    text = 'start: "a"'
    given = [params({kind: text}) for kind in ("regex", "grammar")]
    outputs = engine(m1_single).generate(["prompt"] * 2, given)
    assert [output.text for output in outputs] == [text, "a"]


def test_choices_may_come_from_a_generator() -> None:
    assert StructuredOutputsParams(choice=(each for each in "ab")).choice == ("a", "b")  # type: ignore[arg-type]


def test_what_a_model_cannot_have_is_refused() -> None:
    with pytest.raises(InputError, match="tokenizer"):
        Grammars(None, 9, frozenset([1])).rule_of(params({"regex": "a"}))
    with pytest.raises(InputError, match="EOS"):
        Grammars(TOKENIZER, 9, frozenset()).rule_of(params({"regex": "a"}))
    with pytest.raises(InputError, match="ignore_eos"):
        Grammars(TOKENIZER, 9, frozenset([1])).rule_of(params({"regex": "a"}, ignore_eos=True))
    with pytest.raises(InputError, match="StructuredOutputsParams"):
        Grammars(TOKENIZER, 9, frozenset([1])).rule_of(SamplingParams(structured_outputs="a"))


def test_no_rule_waits_for_another_that_is_compiled(monkeypatch) -> None:
    grammars = new_grammars()
    ready, other, new = (params({"regex": each}) for each in "abc")
    grammars.rule_of(ready)
    begun, may_end, compile = threading.Event(), threading.Event(), grammars._compile

    def slow(wanted: StructuredOutputsParams) -> Any:
        if wanted.regex == "b":
            begun.set()
            assert may_end.wait(60)
        return compile(wanted)

    monkeypatch.setattr(grammars, "_compile", slow)
    with compiling_threads() as threads:
        made = threads.submit(grammars.rule_of, other)
        assert begun.wait(60)
        same = threads.submit(grammars.rule_of, other)
        for each in (ready, new):
            assert grammars.rule_of(each) is not None  # or this test has no end
        may_end.set()
        assert made.result() is not None
        assert same.result() is not None
    grammars.rule_of(params({"regex": "d"}))
    assert len(grammars._compiled) == 4


def test_an_interrupted_compilation_is_done_again(monkeypatch) -> None:
    grammars = new_grammars()
    break_at_call(monkeypatch, grammars, "_compile", {1}, SystemExit())
    with pytest.raises(SystemExit):
        grammars.rule_of(params({"regex": "a"}))
    assert grammars.rule_of(params({"regex": "a"})) is not None


def test_a_warm_up_builds_the_tables(monkeypatch) -> None:
    grammars = new_grammars()
    grammars.warm_up()
    monkeypatch.setattr("llguidance.hf.from_tokenizer", None)
    assert grammars.rule_of(params({"regex": "a"})) is not None
    Grammars(None, 9, frozenset()).warm_up()  # a model without grammars is none to be told of


def test_of_many_grammars_those_of_the_newest_requests_are_kept(monkeypatch):
    monkeypatch.setattr("milestone_llm.structured.grammars.MAX_COMPILED", 2)
    grammars = new_grammars()
    compiled: list[str] = []
    compile_one = grammars._compile
    monkeypatch.setattr(
        grammars, "_compile", lambda params: compiled.append(params.regex) or compile_one(params)
    )
    for regex in ("a", "b", "c", "c", "b", "a"):
        grammars.rule_of(SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))
    assert compiled == ["a", "b", "c", "a"]
