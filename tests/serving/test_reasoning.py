"""Thoughts in a field of their own, and OpenAI's fields that are wishes, over HTTP."""

import shutil

import pytest

from helpers.servers import serve, wait_for

TEMPLATE = """\
{% for message in messages %}{{ message.content }}{% endfor %}
{{- reasoning_effort }}{{ verbosity }}{{ "<think>" if enable_thinking else "" }}{# </think> #}"""
MESSAGES = [{"role": "user", "content": "Who?"}]
WISHES = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "verbosity": "low"}


@pytest.fixture(scope="module")
def thinking(model_folder, tmp_path_factory):
    """Start a server with a chat template that knows thoughts."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("thinking") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serve("m4_prefix_chunked", folder, folder / "log", "--max-num-seqs", "2") as server:
        yield server


def asked(server, opens, **fields):
    """Return the fields of a chat whose prompt begins the thoughts, or not."""
    variables = {"enable_thinking": opens, **fields.pop("variables", {})}
    fixed = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    return {**fixed, **fields, "extra_body": {"chat_template_kwargs": variables}}


def test_thoughts_that_the_prompt_begins_are_in_their_own_field(thinking):
    create = thinking.client().chat.completions.create
    (choice,) = create(**asked(thinking, True)).choices
    expected = thinking.client().completions.create(
        model=thinking.model, prompt="Who?<think>", temperature=0, max_tokens=12
    )
    assert choice.message.reasoning_content.strip() == expected.choices[0].text.strip() != ""
    assert choice.message.content == ""
    deltas = [event.choices[0].delta for event in create(**asked(thinking, True), stream=True)]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == choice.message.reasoning_content
    assert not any(delta.content for delta in deltas)

    (plain,) = create(**asked(thinking, False)).choices
    assert plain.message.content
    assert "reasoning_content" not in plain.message.model_dump()


def test_thoughts_are_an_item_of_a_response(thinking):
    body = {"input": "Who?", "temperature": 0, "max_output_tokens": 12}
    body |= {"chat_template_kwargs": {"enable_thinking": True}}
    create = thinking.client().responses.create
    fields = {"model": thinking.model, "input": "Who?", "extra_body": body}
    (item,) = create(**fields).output
    (text,) = (part.text for part in item.content)
    assert (item.type, bool(text)) == ("reasoning", True)
    events = list(create(**fields, stream=True))
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == text


def test_an_option_leaves_thoughts_in_the_content(thinking, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serve("m4_prefix_chunked", folder, tmp_path / "log", "--no-reasoning-content") as server:
        (choice,) = server.client().chat.completions.create(**asked(server, True)).choices
        assert choice.message.content
        assert "reasoning_content" not in choice.message.model_dump()


def test_wishes_are_taken_and_named_once_in_the_log(thinking):
    create = thinking.client().chat.completions.create
    sizes = []
    for fields in ({}, {"reasoning_effort": "low"}, {**WISHES, "reasoning_effort": "high"}):
        answer = create(**asked(thinking, False, **fields))
        sizes.append(answer.usage.prompt_tokens)
    assert sizes == [4, 4 + len("low"), 4 + len("highlow")]
    wait_for(lambda: "service_tier" in thinking.log.read_text())
    for name in ("store", "metadata", "reasoning_effort", "verbosity"):
        assert thinking.log.read_text().count(f"'{name}'") == 1
    answer = thinking.client().responses.create(
        model=thinking.model, input="Who?", reasoning={"effort": "low"}, text={"verbosity": "high"}
    )
    assert answer.usage.input_tokens == 4 + len("lowhigh")
