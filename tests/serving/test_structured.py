"""Structured outputs over HTTP, by OpenAI's client."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from helpers.servers import byte_tokenizer, wait_for
from milestone_llm.serving.api.calls import AnswerReader, CallWriting

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 22, 120]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
MESSAGES = [{"role": "user", "content": "Who?"}]


def strict(**schema):
    """Return a format whose schema may not lose anything."""
    return {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}


pytest.importorskip("llguidance", reason="llguidance is not installed")


def test_a_chat_keeps_to_a_schema_in_whole_and_in_pieces(server):
    chats = server.client().chat.completions
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 80, "seed": 5}
    (choice,) = chats.create(**asked, response_format=FORMAT).choices
    jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert choice.finish_reason == "stop"
    pieces = [
        event.choices[0].delta.content or ""
        for event in chats.create(**asked, response_format=FORMAT, stream=True)
    ]
    assert "".join(pieces) == choice.message.content


def test_vllms_field_takes_all_kinds(roomy):
    def text(**wanted):
        answer = roomy.client().completions.create(
            model=roomy.model,
            prompt="Say",
            max_tokens=40,
            seed=1,
            extra_body={"structured_outputs": wanted},
        )
        return answer.choices[0].text

    assert text(choice=["red", "green"]) in ("red", "green")
    assert text(regex="[0-9]{3}").isdigit()
    assert text(grammar='start: "a" "b"') == "ab"
    assert isinstance(json.loads(text(json={"type": "integer", "maximum": 9, "minimum": 0})), int)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"structured_outputs": {"regex": "(unclosed"}}, "unclosed"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"colour": "red"}}, "colour"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "left out.*json_schema.schema",
        ),
        ({"response_format": {**FORMAT, "type": "json_object"}}, "left out.*json_schema.schema"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "either"),
        ({"structured_outputs": {"grammar": 'a ::= "yes"'}}, "structured_outputs .*root"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs cannot"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "no text"),
        ({"structured_outputs": {"json": {"multipleOf": 10**8 + 7}}}, "multipleOf"),
        ({"response_format": strict(uniqueItems=True)}, "response_format cannot .*uniqueItems"),
    ],
)
def test_what_cannot_be_compiled_is_named(roomy, fields, told):
    with pytest.raises(openai.BadRequestError, match=told) as refused:
        roomy.client().chat.completions.create(
            model=roomy.model, messages=MESSAGES, extra_body=fields
        )
    assert refused.value.param in fields


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"structured_outputs": {"grammar": 'root ::= "a"{1000000000}'}}, "Too many items"),
        ({"response_format": strict(enum=["ab\u65e5", "ab\u65e6"])}, "tokens can spell"),
    ],
)
def test_a_rule_that_fails_amid_an_output_is_named(roomy, fields, told):
    (param,) = fields
    asked = {"model": roomy.model, "messages": MESSAGES, "extra_body": fields, "max_tokens": 90}
    with pytest.raises(openai.BadRequestError, match=f"{param} failed .*{told}") as failed:
        roomy.client().chat.completions.create(**asked)
    assert failed.value.param == param
    stream, texts = roomy.client().chat.completions.create(**asked, stream=True), []
    with pytest.raises(openai.APIError, match=f"{param} failed .*{told}") as failed:
        texts += (event.choices[0].delta.content for event in stream)
    assert failed.value.param == param
    assert "".join(texts)  # what came before


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [69]}, "allowed_token_ids and bad_words:"),  # 69 is an "a"
        ({"structured_outputs": {"choice": ["aa"]}}, "bad_words:"),
    ],
)
def test_lists_that_leave_no_token_are_named(roomy, fields, names):
    body = {"prompt": "a", "max_tokens": 4, "bad_words": ["aa"], **fields}
    status, answer = roomy.fetch("POST", "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, names.split()[0].rstrip(":"))
    assert answer["error"]["message"].startswith(names)


def test_fields_that_are_all_null_ask_for_nothing(roomy):
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": None, "regex": None}}
    assert roomy.fetch("POST", "/v1/completions", body)[0] == 200


SET_OF_DIGITS = {
    "type": "object",
    "properties": {
        "digits": {
            "type": "array",
            "items": {"type": "string", "pattern": "^(?!0)[0-9]$"},
            "uniqueItems": True,
            "maxItems": 1,
        },
        "colour": {"type": "string", "format": "colour", "maxLength": 3},
    },
    "propertyNames": {"maxLength": 9},
    "required": ["digits", "colour"],
    "additionalProperties": False,
    "if": {"required": ["digits"]},
    "then": {"required": ["colour"]},
}
"""A schema with keywords that the grammar cannot say."""


def test_what_a_grammar_cannot_say_is_left_out_and_logged(roomy):
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SET_OF_DIGITS}}
    tool = {"type": "function", "function": {"name": "f", "parameters": SET_OF_DIGITS}}
    asked = {"model": roomy.model, "messages": MESSAGES, "max_tokens": 200, "seed": 4}
    bias = {"logit_bias": {byte_tokenizer().convert_tokens_to_ids('"'): 9}}
    chats = roomy.client().chat.completions
    (choice,) = chats.create(**asked, **bias, response_format=wanted).choices
    assert {*json.loads(choice.message.content)} == {"digits", "colour"}
    (choice,) = chats.create(**asked, **bias, tools=[tool], tool_choice="required").choices
    assert {*json.loads(choice.message.tool_calls[0].function.arguments)} == {"digits", "colour"}
    wait_for(lambda: "pattern '^(?!0)[0-9]$'" in roomy.log.read_text())
    for word in ("uniqueItems", "propertyNames", "Unknown format: colour", "then"):
        assert word in roomy.log.read_text()


# --- calls of functions ---------------------------------------------------------------------------

PLACE: dict[str, Any] = {
    "$defs": {"city": {"enum": ["Rome", "{}}"]}},
    "type": "object",
    "required": ["city"],
}
PLACE |= {"properties": {"city": {"$ref": "#/$defs/city"}}, "additionalProperties": False}
CLOCK, WEATHER = (
    {"type": "function", "function": {"name": "clock", "description": "The time."}},
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
)
STRANGE = {"name": "a", "parameters": {"type": "strange"}}
TEXT = {"name": "a", "parameters": {"type": "string"}}
STRICT = {"name": "a", "strict": True, "parameters": {"propertyNames": {"maxLength": 3}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def called(server, **fields):
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 90, "seed": 2}
    asked |= {"tools": [CLOCK, WEATHER], "tool_choice": "required", **fields}
    return server.client().chat.completions.create(**asked)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_function_is_called_in_whole_and_in_pieces(roomy, choice, seed):
    (whole,) = called(roomy, tool_choice=choice, seed=seed).choices
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.type) == (
        "tool_calls",
        None,
        "function",
    )
    arguments = json.loads(call.function.arguments)
    if choice == NAMED or call.function.name == "weather":
        assert call.function.name == "weather"
        jsonschema.validate(arguments, PLACE)
    else:
        assert (call.function.name, arguments) == ("clock", {})

    events = list(called(roomy, tool_choice=choice, seed=seed, stream=True, logprobs=True))
    choices = [event.choices[0] for event in events]
    deltas = [each for one in choices for each in one.delta.tool_calls or ()]
    assert (deltas[0].id[:5], deltas[0].function.name) == ("call_", call.function.name)
    assert {(each.id, each.function.name, each.index) for each in deltas[1:]} <= {(None, None, 0)}
    assert "".join(each.function.arguments for each in deltas) == call.function.arguments
    assert choices[0].delta.role == "assistant"
    assert choices[-1].finish_reason == "tool_calls"


def test_a_call_that_ends_by_length_has_the_arguments_so_far(roomy):
    begin = '{"name": "weather", "arguments": '
    (choice,) = called(roomy, tool_choice=NAMED, max_tokens=len(begin) + 7).choices
    assert choice.finish_reason == "length"
    assert len(choice.message.tool_calls[0].function.arguments) == 7
    (choice,) = called(roomy, max_tokens=5).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


@pytest.mark.parametrize("parameters", [{}, {"type": ["object", "null"]}, {"title": "Arguments"}])
def test_arguments_are_an_object(roomy, parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    digits = [byte_tokenizer().convert_tokens_to_ids(each) for each in "}0123456789"]
    (choice,) = called(roomy, tools=[tool], logit_bias=dict.fromkeys(digits, 50)).choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {}


def test_arguments_may_be_nested_to_any_depth():
    arguments = '{"a}": [' * 3000 + '"\\"}{["' + "]}" * 3000
    reader = AnswerReader(CallWriting(), has_words=False)
    (part,) = reader.read(f'{{"name": "f", "arguments": {arguments}}}', is_ended=True)
    assert (part.name, part.arguments, reader.is_complete) == ("f", arguments, True)
    cut = AnswerReader(CallWriting(), has_words=False)
    cut.read(f'{{"name": "f", "arguments": {arguments[:-1]}', is_ended=True)
    assert not cut.is_complete


def test_a_conversation_goes_on_after_a_call(roomy):
    """The tiny model's template shows nothing of calls: they are written as text."""
    (choice,) = called(roomy).choices
    call = choice.message.tool_calls[0]
    answer = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    messages = [*MESSAGES, choice.message.model_dump(exclude_none=True), answer]
    texts = [
        called(roomy, messages=messages, max_tokens=5, **fields).choices[0].message.content
        for fields in ({"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"})
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": []}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 'a"'}}]}, "tools"),
        ({"tools": [{"type": "function", "function": STRANGE}]}, "tools"),
        ({"tools": [{"type": "function", "function": TEXT}]}, "tools"),
        ({"tools": [{"type": "function", "function": STRICT}]}, "tools"),
        ({"response_format": FORMAT}, "tools"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]},
            "messages",
        ),
    ],
)
def test_a_call_that_cannot_be_is_refused(roomy, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        called(roomy, **fields)
    assert refused.value.param == param


def test_of_several_schemas_the_one_to_blame_is_named(roomy):
    def refusal(*functions, **fields):
        tools = [{"type": "function", "function": each} for each in functions]
        with pytest.raises(openai.BadRequestError) as refused:
            called(roomy, tools=tools, **fields)
        return refused.value.param, refused.value.message

    others = CLOCK["function"], WEATHER["function"]
    strict = {**STRICT, "name": "strict"}
    assert refusal(*others, strict) == refusal(strict, *others)
    param, message = refusal(*others, strict)
    assert param == "tools"
    assert "tools: parameters of strict cannot" in message


# --- words or a call ------------------------------------------------------------------------------


def pushed(**biases):
    """Return biases to the tokens of characters: x=60 for "x"."""
    ids = {byte_tokenizer().encode(each)[0]: bias for each, bias in biases.items()}
    return {"logit_bias": ids}


def parts_of(events):
    """Return the words, the names and the arguments of a stream's calls, and how it ended."""
    words, calls, reason = "", [], None
    for event in events:
        (choice,) = event.choices
        words += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return words, calls, reason


def test_a_model_chooses_between_words_and_a_call(server):
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"model": server.model, "messages": MESSAGES, "tools": [tool], "temperature": 0}
    create = server.client().chat.completions.create
    (choice,) = create(**asked, max_tokens=9, **pushed(w=60)).choices
    assert (choice.message.content, choice.message.tool_calls) == ("w" * 9, None)
    assert choice.finish_reason == "length"
    assert parts_of(create(**asked, max_tokens=9, **pushed(w=60), stream=True)) == (
        "w" * 9,
        [],
        "length",
    )
    (choice,) = create(**asked, max_tokens=40, **pushed(**{"{": 60, "}": 40})).choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert (call.function.name, call.function.arguments) == ("f", "{}")
    stream = create(**asked, max_tokens=40, **pushed(**{"{": 60, "}": 40}), stream=True)
    assert parts_of(stream) == ("", [["f", "{}"]], "tool_calls")


def test_an_answer_has_several_calls_if_that_is_asked_for(roomy):
    asked = {"tools": [CLOCK, WEATHER], "tool_choice": "auto", "max_tokens": 300}
    bias = pushed(**{"{": 60, "\n": 20})
    (one,) = called(roomy, **asked, **bias).choices
    (many,) = called(roomy, **asked, **bias, parallel_tool_calls=True).choices
    assert len(one.message.tool_calls) == 1
    assert len(many.message.tool_calls) > 2
    assert len({call.id for call in many.message.tool_calls}) == len(many.message.tool_calls)
    words, calls, _ = parts_of(
        called(roomy, **asked, **bias, parallel_tool_calls=True, stream=True)
    )
    whole = [[call.function.name, call.function.arguments] for call in many.message.tool_calls]
    assert (words, calls) == ("", whole)


def test_only_allowed_tools_are_called_and_all_are_shown(roomy):
    def allowed(mode, *names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    sizes = set()
    for name in ("clock", "weather"):
        answer = called(roomy, tool_choice=allowed("required", name))
        assert answer.choices[0].message.tool_calls[0].function.name == name
        sizes.add(answer.usage.prompt_tokens)
    answer = called(roomy, tool_choice=allowed("auto", "clock"), max_tokens=5, **pushed(w=60))
    assert answer.choices[0].message.content == "w" * 5
    assert sizes == {answer.usage.prompt_tokens}
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'x'"):
        called(roomy, tool_choice=allowed("auto", "x"))


def test_words_of_a_form_need_calls_with_a_mark(roomy):
    with pytest.raises(openai.BadRequestError, match="no mark") as refused:
        called(roomy, tool_choice="auto", response_format=FORMAT)
    assert refused.value.param == "tools"


def test_the_log_says_where_tools_are_described(roomy):
    called(roomy)
    wait_for(lambda: "tools are described in the system message" in roomy.log.read_text())
    called(roomy)
    assert roomy.log.read_text().count("tools are described in the system message") == 1
