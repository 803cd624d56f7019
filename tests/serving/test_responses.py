"""`/v1/responses`, by OpenAI's client."""

import json
import re
from typing import Any

import openai
import pytest

from helpers.servers import byte_tokenizer
from milestone_llm.serving.api.responses_request import ResponsesRequest

NO_PARAMETERS = {"type": "object", "properties": {}}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": NO_PARAMETERS}
CLOCK |= {"strict": False, "description": "The time."}
WHO = [{"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}]


def ask(server, **fields):
    asked = {"model": server.model, "input": WHO, "temperature": 0, **fields}
    return server.client().responses.create(**asked)


def chat(server, messages=({"role": "user", "content": "Who?"},), **fields):
    asked = {"model": server.model, "messages": list(messages), "temperature": 0, **fields}
    return server.client().chat.completions.create(**asked)


def pushed(**biases):
    ids = {byte_tokenizer().encode(each)[0]: bias for each, bias in biases.items()}
    return {"extra_body": {"logit_bias": ids}}


def test_a_text_is_that_of_a_chat(server):
    answer = ask(server, max_output_tokens=9, instructions="Be brief.", metadata={"a": "b"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    same = chat(server, messages, max_tokens=9)
    assert answer.output_text == same.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == same.usage.prompt_tokens
    assert answer.usage.output_tokens == 9
    assert answer.metadata == {"a": "b"}


def test_events_build_the_response(server):
    whole = ask(server, input="Who?", max_output_tokens=12)
    events = list(ask(server, input="Who?", max_output_tokens=12, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-4].text == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_a_function_is_called_and_its_result_comes_back(roomy):
    bias = pushed(**{"{": 60, "}": 40})
    asked = {"tools": [CLOCK], "max_output_tokens": 90, **bias}
    answer = ask(roomy, **asked)
    (call,) = answer.output
    assert (call.type, call.name, call.arguments) == ("function_call", "clock", "{}")
    assert answer.status == "completed"
    events = list(ask(roomy, **asked, stream=True))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "{}"
    assert events[-1].response.output[0].arguments == "{}"

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    history = [*WHO, call.model_dump(exclude_none=True), result]
    tool_call = {"id": call.call_id, "type": "function"}
    tool_call["function"] = {"name": "clock", "arguments": "{}"}
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
    ]
    tool = {name: CLOCK[name] for name in ("name", "parameters", "strict", "description")}
    words = pushed(w=60)
    second = ask(roomy, tools=[CLOCK], input=history, max_output_tokens=5, **words)
    same = chat(
        roomy, messages, tools=[{"type": "function", "function": tool}], max_tokens=5, **words
    )
    assert second.output_text == same.choices[0].message.content == "w" * 5
    assert second.usage.input_tokens == same.usage.prompt_tokens
    only = {"type": "function", "name": "clock"}
    for choice in (
        "required",
        only,
        {"type": "allowed_tools", "mode": "required", "tools": [only]},
    ):
        forced = ask(roomy, tools=[CLOCK], tool_choice=choice, max_output_tokens=90)
        assert forced.output[0].name == "clock"


def test_a_text_has_a_form(roomy):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    answer = ask(roomy, text=form, max_output_tokens=90)
    assert json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.text.format.name == "n"
    asked = {"model": roomy.model, "input": WHO, "temperature": 0, "text": form}
    with roomy.client().responses.stream(**asked, max_output_tokens=90) as stream:
        assert stream.get_final_response().output_text == answer.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "user", "content": 3}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
def test_what_is_not_supported_is_named(roomy, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(roomy, **fields)
    assert refused.value.param == param


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([*WHO, CALL, IMAGE], "input.2.content: parts of type input_image"),
        ([{"type": "function_call_output", "call_id": "x", "output": ""}], "input.0: tool_call_id"),
        ([*WHO, {"type": "message", "content": "x"}], "input.1 has no 'role'"),
        ([{"role": "user", "content": [3]}], "input.0.content: it must be text"),
        ([*WHO, {"role": "tool", "tool_call_id": "1", "content": "x"}], "function_call_output"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "function_call"),
    ],
)
def test_errors_name_the_item(server, items, said):
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        ask(server, input=items, instructions="Be brief.")


def test_an_answer_of_several_items_is_one_message():
    text = {"type": "output_text", "text": "I look."}
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [text]},
        {**call, "call_id": "1"},
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "message", "role": "assistant", "content": "c"},
    ]
    messages = ResponsesRequest(input=items).chat().messages
    assert [message.role for message in messages] == ["assistant", "tool", "assistant", "assistant"]
    first = messages[0].as_dict()
    assert first["reasoning_content"] == "Hm."
    assert [each["id"] for each in first["tool_calls"]] == ["1", "2"]
