"""Conversations under chat templates that disagree: what a message says reaches the prompt, or the
conversation is refused."""

from __future__ import annotations

import json

import pytest

from helpers.servers import byte_tokenizer
from milestone_llm.core.errors import InputError
from milestone_llm.models.chat import render_chat
from milestone_llm.serving.api.protocol import ChatRequest

OPEN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
"""Shows messages of every role, and nothing of calls and tools."""
STRICT = """\
{%- if messages[0].role == "system" %}[system] {{ messages[0].content }}
{% endif %}
{%- if tools %}{% for tool in tools %}[tool] {{ tool.function | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}[user] {{ m.content }}
{% elif m.role == "tool" %}[result] {{ m.content | trim }}
{% elif m.role == "assistant" %}[assistant] {{ m.content }}
{%- for call in m.tool_calls or [] %} {{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}
{%- endfor %}
{% endif %}
{%- endfor %}"""
"""Shows a first system message, tools, calls and their results. Other roles vanish."""
NULLS = """\
{% for m in messages %}[{{ m.role }}] {% if m.content is none %}\
{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}
{% endfor %}"""
"""Shows a call only where the content is null."""
NO_SYSTEM = """\
{% for m in messages %}\
{% if m.role not in ["user", "assistant"] %}{{ raise_exception("only users here") }}{% endif %}\
[{{ m.role }}] {{ m.content }}
{% endfor %}"""
"""Refuses all roles but two."""

USER = {"role": "user", "content": "where?"}
CALL = {"id": "1", "type": "function", "function": {"name": "see", "arguments": '{"city": "Rome"}'}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}
TOOL = {"type": "function", "function": {"name": "see", "description": "looks out"}}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def assistant(content, *calls):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


CALLED = assistant(None, CALL)


def offline(template, messages, tools=None):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer.decode(render_chat(tokenizer, messages, tools=tools))


def over_http(template, messages, tools=None):
    body = ChatRequest.model_validate({"messages": messages})
    return offline(template, [message.as_dict() for message in body.messages], tools)


@pytest.fixture(params=[offline, over_http])
def render(request):
    """Both ways to a prompt."""
    return request.param


def test_results_come_in_the_order_of_their_calls(render):
    calls = [assistant(None, CALL, {**CALL, "id": "2"}), {**RESULT, "tool_call_id": "2"}, RESULT]
    calls[1]["content"] = "sun"
    text = render(OPEN, [USER, *calls])
    assert 0 < text.index("rain") < text.index("sun")


@pytest.mark.parametrize(
    "messages", [[RESULT], [assistant(None, {**CALL, "id": "2"}), RESULT], [CALLED, RESULT, RESULT]]
)
def test_a_result_without_its_call_is_refused(render, messages):
    with pytest.raises(InputError, match=f"messages.{len(messages)}: tool_call_id '1'"):
        render(OPEN, [USER, *messages])


@pytest.mark.parametrize("template", [OPEN, STRICT, NULLS])
@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (["ok", parts("ok")], "ok"),
        ([None, "", [], parts("")], ""),
        (["a\nb", parts("a", "b")], "a\nb"),
    ],
)
def test_a_call_is_shown_alike_beside_every_form_of_content(render, template, contents, text):
    prompts = {render(template, [USER, assistant(each, CALL), RESULT]) for each in contents}
    (prompt,) = prompts
    assert all(said in prompt for said in ("[assistant] " + text, "see", "Rome", "rain"))
    assert '\\"' not in prompt, "the arguments stayed a text within a text"


def test_arguments_are_objects_for_the_template(render):
    assert "see city=Rome" in render(STRICT, [USER, assistant(parts("ok"), CALL), RESULT])
    without = {**CALL, "function": {"name": "see", "arguments": ""}}  # as some clients write none
    assert "see" in render(STRICT, [USER, assistant("ok", without), RESULT])


def test_a_call_that_a_template_does_not_show_is_written_as_the_server_writes_calls(render):
    prompt = render(OPEN, [USER, assistant("I look.", CALL, CALL), RESULT])
    call = '{"name": "see", "arguments": {"city": "Rome"}}'
    assert prompt == f"[user] where?\n[assistant] I look.\n{call}\n{call}\n[tool] rain\n"


def test_parts_are_joined_with_newlines(render):
    message = {"role": "user", "content": [*parts("a"), {"type": "refusal", "refusal": "b"}]}
    assert render(OPEN, [message]) == "[user] a\nb\n"


@pytest.mark.parametrize(
    ("template", "role"), [(OPEN, "developer"), (STRICT, "system")], ids=["open", "strict"]
)
def test_a_developer_is_shown_as_such_or_as_system(render, template, role):
    prompt = render(template, [{"role": "developer", "content": "Obey"}, USER])
    assert prompt == f"[{role}] Obey\n[user] where?\n"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "sytem", "content": "Obey"}, USER],
        [USER, {"role": "system", "content": "Obey"}, USER],
        [USER, {"role": "developer", "content": "Obey"}, USER],
        [{"role": "system", "content": "a"}, {"role": "developer", "content": "Obey"}, USER],
    ],
)
def test_a_message_that_a_template_leaves_out_is_refused_by_its_role(render, messages):
    place, role = [(at, each["role"]) for at, each in enumerate(messages) if each != USER][-1]
    for template, tools in (
        (STRICT, None),
        (STRICT, [TOOL]),
        (STRICT.replace("tools", "x"), [TOOL]),
    ):
        with pytest.raises(InputError, match=rf"messages\.{place}: .* does not show .* '{role}'"):
            render(template, messages, tools)


def test_what_a_template_refuses_is_refused_in_its_words(render):
    for role in ("developer", "system", "tool"):
        with pytest.raises(InputError, match="only users here"):
            render(NO_SYSTEM, [{"role": role, "content": "Obey"}, USER])


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]])
def test_functions_that_a_template_does_not_show_are_in_the_system_message(render, before):
    system, user = render(OPEN, [*before, USER], [TOOL]).split("[user]")
    assert system.startswith("[system] Be brief." if before else "[system] You can call")
    assert json.dumps(TOOL["function"]) in system
    assert user == " where?\n"
    assert render(STRICT, [*before, USER], [TOOL]).count("looks out") == 1
    with pytest.raises(InputError, match=r"tools: .* shows neither"):
        render(NO_SYSTEM, [USER], [TOOL])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "", "content": "a"}, "messages.0 needs a role"),
        ({"role": "user", "content": None}, "messages.0: a message of role user needs a content"),
        ({"role": "other"}, "messages.0: a message of role other needs a content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url are not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of type text has no text"),
        *(
            ({**assistant("a"), "tool_calls": calls}, "messages.0.tool_calls is a list of calls")
            for calls in (
                [{}],
                {"a": 1},
                [{"function": {"name": "a"}}],
                *(
                    [{"function": {"name": "a", "arguments": arguments}}]
                    for arguments in ('{"half', "[1]", "3", 3, None, "[" * 10**5)
                ),
            )
        ),
    ],
)
def test_a_malformed_message_is_refused_where_it_is(render, message, error):
    with pytest.raises(InputError, match=error):
        render(OPEN, [message])
