"""Structured outputs over HTTP, by OpenAI's client."""

import json

import jsonschema
import openai
import pytest

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 22, 120]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
MESSAGES = [{"role": "user", "content": "Who?"}]

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


def test_vllms_field_takes_all_kinds(m4):
    def text(**wanted):
        answer = m4.client().completions.create(
            model=m4.model,
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
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "either"),
        (
            {"structured_outputs": {"json": {"unevaluatedProperties": False}}},
            "unevaluatedProperties",
        ),
    ],
)
def test_what_cannot_be_compiled_is_named(m4, fields, told):
    with pytest.raises(openai.BadRequestError, match=told):
        m4.client().chat.completions.create(model=m4.model, messages=MESSAGES, extra_body=fields)


def test_text_asks_for_nothing(m4):
    client = m4.client().chat.completions
    asked = {"model": m4.model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    plain, text = client.create(**asked), client.create(**asked, response_format={"type": "text"})
    assert plain.choices[0].message.content == text.choices[0].message.content
