"""The form of calls, read from chat templates of several families, and what is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from helpers.servers import byte_tokenizer
from milestone_llm.models.call_form import CallForm, call_form
from milestone_llm.models.chat import render_chat
from milestone_llm.serving.api.calls import AnswerReader, CallWriting
from milestone_llm.serving.api.errors import ApiError
from milestone_llm.serving.api.protocol import ChatRequest

HERMES = """\
{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>
{% endfor %}
{%- for m in messages %}{{ "<s>" + m.role + "\n" + m.content }}
{%- for call in m.tool_calls or [] %}{{ "\n" if m.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ "</s>\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<s>assistant\n" }}{% endif %}"""
"""In the way of Hermes and Qwen."""
LLAMA = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}{{ "<s>" + m.role + "\n\n" }}{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}" }}
{%- else %}{{ m.content }}{% endif %}{{ "</s>" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<s>assistant\n\n" }}{% endif %}"""
"""In the way of Llama 3."""
MISTRAL = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{% if m.role == "user" %}[INST]{{ m.content }}[/INST]
{%- elif m.role == "tool" %}[RESULTS]{{ m.content }} {{ m.tool_call_id }}[/RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}
{{- raise_exception("ids have nine characters") }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ", " if not loop.last }}{% endfor %}]</s>
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
"""In the way of Mistral."""
XML = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}[{{ m.role }}] {{ m.content }}
{%- for call in m.tool_calls or [] %}<call name="{{ call.function.name }}">
{%- for name, value in call.function.arguments.items() %}<{{ name }}>{{ value }}</{{ name }}>
{%- endfor %}</call>{% endfor %}</s>{% endfor %}"""
"""Arguments are no JSON."""

PLACE = {"type": "object", "properties": {"city": {"enum": ["Rome", "}]"]}}, "required": ["city"]}
FUNCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("see", PLACE),
    ("now", {"type": "object", "additionalProperties": False}),
]


def tokenizer_of(template: str, *, has_tokens: bool = True) -> Any:
    """Return a tokenizer of bytes with a template, and with the tokens that the template names."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if has_tokens:
        hidden = [AddedToken(name, special=True) for name in ("[TOOL_CALLS]", "[hidden]")]
        shown = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        tokenizer.add_tokens([AddedToken(name, special=False) for name in shown] + hidden)
    return tokenizer


CASES = {"HERMES": HERMES, "LLAMA": LLAMA, "MISTRAL": MISTRAL}
ONE = '{"name": "see", "arguments": {"city": "Rome"}}'
TWO = '{"name": "now", "arguments": {}}'
CALLS = {
    "HERMES": f"<tool_call>\n{ONE}\n</tool_call>",
    "LLAMA": ONE.replace("arguments", "parameters"),
    "MISTRAL": f"[TOOL_CALLS] [{ONE}]",
    "general": ONE,
}
BOTH = {
    "HERMES": f"{CALLS['HERMES']}\n<tool_call>\n{TWO}\n</tool_call>",
    "MISTRAL": f"[TOOL_CALLS] [{ONE}, {TWO}]",
    "general": f"{ONE}\n{TWO}",
}


def writing_of(name: str, *, has_tokens: bool = True) -> tuple[Any, CallWriting]:
    tokenizer = tokenizer_of(CASES.get(name, XML), has_tokens=has_tokens)
    return tokenizer, CallWriting(tokenizer, [tokenizer.eos_token_id])


def test_forms_are_read_from_templates() -> None:
    assert call_form(tokenizer_of(HERMES)) == CallForm(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        "}\n</tool_call>",
    )
    assert call_form(tokenizer_of(LLAMA)) == CallForm('{"name": "', '", "parameters": ', None, "}")
    assert call_form(tokenizer_of(MISTRAL)) == CallForm(
        '[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]"
    )
    assert call_form(tokenizer_of(XML)) is None
    assert call_form(byte_tokenizer()) is None
    assert call_form(None) is None


def test_calls_that_special_tokens_mark_are_read_in_text_without_these() -> None:
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "skip_special_tokens": False,
    }
    for name in ("HERMES", "LLAMA", "general"):
        _, writing = writing_of(name)
        assert ChatRequest(**chat).structured_params(writing) is not None
    _, writing = writing_of("MISTRAL")
    with pytest.raises(ApiError, match="skip_special_tokens=false") as refused:
        ChatRequest(**chat).structured_params(writing)
    assert (refused.value.status_code, refused.value.param) == (400, "skip_special_tokens")


@pytest.mark.parametrize("opening", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_thoughts_that_a_template_opens_are_no_part_of_the_form(opening: str) -> None:
    opened = HERMES.replace('"<s>assistant\\n"', json.dumps(f"<s>assistant\n{opening}"))
    assert call_form(tokenizer_of(opened)) == call_form(tokenizer_of(HERMES))


def accepts(tokenizer: Any, grammar: str, text: str) -> bool:
    """Return whether a text, and then EOS, keeps to a grammar."""
    llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")
    from llguidance.hf import from_tokenizer

    tokens = from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == text
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", ["HERMES", "LLAMA", "MISTRAL", "general"])
def test_words_are_free_and_calls_keep_to_their_schema(name: str, has_tokens: bool) -> None:
    tokenizer, writing = writing_of(name, has_tokens=has_tokens)
    auto = writing.grammar(FUNCTIONS, is_required=False, is_parallel=False)
    several = writing.grammar(FUNCTIONS, is_required=False, is_parallel=True)
    required = writing.grammar(FUNCTIONS, is_required=True, is_parallel=False)
    call = CALLS[name]
    for grammar in (auto, several, required):
        assert accepts(tokenizer, grammar, call)
        assert not accepts(tokenizer, grammar, call.replace("see", "sea"))
        assert not accepts(tokenizer, grammar, call.replace("Rome", "Oslo"))
        assert not accepts(tokenizer, grammar, call[:-1])
        assert accepts(tokenizer, grammar, "Rome is {old}.\n") == (grammar != required)
        assert accepts(tokenizer, grammar, "") == (grammar != required)
    if name in BOTH:
        assert accepts(tokenizer, several, BOTH[name])
        assert not accepts(tokenizer, auto, BOTH[name])
    if writing.has_mark:
        assert accepts(tokenizer, auto, f"I look. {call}")
        assert not accepts(tokenizer, auto, f"I look. {call} I looked.")
        assert not accepts(tokenizer, auto, f"I look. {call}".replace("Rome", "Oslo"))
    if has_tokens:
        assert accepts(tokenizer, auto, "<think>Hm.</think>Hello")
        assert not accepts(tokenizer, auto, "Hello[hidden]")


@pytest.mark.parametrize("name", ["HERMES", "MISTRAL"])
def test_words_may_have_a_form_where_a_mark_tells_calls(name: str) -> None:
    tokenizer, writing = writing_of(name)
    grammar = writing.grammar(FUNCTIONS, False, False, words_schema={"type": "integer"})
    assert accepts(tokenizer, grammar, "12")
    assert accepts(tokenizer, grammar, CALLS[name])
    assert not accepts(tokenizer, grammar, "twelve")


def read(reader: AnswerReader, text: str, step: int) -> tuple[str, list[list[str]]]:
    """Return the words and the calls that a reader finds in a text which grows by `step`."""
    words, calls = "", list[list[str]]()
    for end in [*range(step, len(text), step), len(text)]:
        for part in reader.read(text[:end], is_ended=end == len(text)):
            words += part.words
            if part.name is not None:
                calls.append([part.name, ""])
            if part.call is not None:
                assert part.call == len(calls) - 1
                calls[-1][1] += part.arguments
    return words, calls


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", ["HERMES", "LLAMA", "MISTRAL", "general"])
def test_a_reader_finds_words_and_calls_however_the_text_comes(name: str, step: int) -> None:
    tokenizer, writing = writing_of(name)

    def reads(text: str, has_words: bool = True) -> tuple[str, list[list[str]], bool]:
        shown = tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True
        )
        reader = AnswerReader(writing, has_words)
        return *read(reader, shown, step), reader.is_complete

    see, call = ["see", '{"city": "Rome"}'], CALLS[name]
    hard = ["see", '{"city": "\\"}<tool_call>[{\\\\"}']
    assert reads(call) == ("", [see], True)
    assert reads(call, has_words=False) == ("", [see], True)
    assert reads(call.replace(see[1], hard[1])) == ("", [hard], True)
    for words in ("Rome is {old}.\n", " \n", "a <tool", "[", "a{"):
        assert reads(words) == (words, [], False)
    if name in BOTH:
        assert reads(BOTH[name]) == ("", [see, ["now", "{}"]], True)
    if writing.has_mark:
        assert reads(f"I look. {call}") == ("I look.", [see], True)
        words = f'{{"a": {json.dumps(call)}}}'
        assert reads(words, has_words=False)[1:] == ([], False)
    cut = call[: call.index("Rome")]
    assert reads(cut) == ("", [["see", '{"city": "']], False)


@pytest.mark.parametrize("name", ["HERMES", "LLAMA", "MISTRAL"])
def test_what_a_model_wrote_is_in_the_next_prompt_as_it_wrote_it(name: str) -> None:
    """So the prefix cache has it. OpenAI's client sends the arguments before the name."""
    tokenizer = tokenizer_of(CASES[name])
    function = {"arguments": '{"city": "Rome"}', "name": "see"}
    call = {"id": "call_" + "0af1" * 8, "type": "function", "function": function}
    tools = [{"type": "function", "function": {"name": "see", "parameters": PLACE}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]
    first = tokenizer.decode(render_chat(tokenizer, messages, tools=tools))
    assert "enum" in first
    assert "You can call" not in first
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
    second = tokenizer.decode(render_chat(tokenizer, messages, tools=tools))
    written = CALLS[name].removesuffix("}]")  # the id follows
    assert second.startswith(first + written)
    assert "rain" in second


def test_tools_are_in_the_system_message_if_the_form_of_calls_cannot_be_read() -> None:
    tools = [{"type": "function", "function": {"name": "see"}}]
    messages = [{"role": "user", "content": "Where?"}]
    text = byte_tokenizer().decode(render_chat(tokenizer_of(XML), messages, tools=tools))
    assert "You can call" in text
    assert text.count('"see"') == 1


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thoughts_are_read_apart(step: int) -> None:
    _, writing = writing_of("HERMES")

    def reads(text: str, **options: Any) -> tuple[str, str, int]:
        reader, thoughts, words = AnswerReader(writing, has_words=True, **options), "", ""
        for end in [*range(step, len(text), step), len(text)]:
            for part in reader.read(text[:end], is_ended=end == len(text)):
                thoughts, words = thoughts + part.thoughts, words + part.words
        return thoughts, words, reader.num_calls

    for calls in (True, False):
        free: dict[str, Any] = {"thoughts": "possible", "has_calls": calls}
        assert reads("<think>\nHm, <b>.\n</think>\n\nYes. \n", **free) == ("Hm, <b>.", "Yes. \n", 0)
        assert reads("Hm.\n</think>\nYes.", **{**free, "thoughts": "begun"}) == ("Hm.", "Yes.", 0)
        assert reads("<think>Hm. \n", **free) == ("Hm. \n", "", 0)
        assert reads("<thin", **free) == ("", "<thin", 0)
        assert reads(" No <think>", **free) == ("", " No <think>", 0)
        assert reads("<think>\n\n</think>\n\nYes.", **free) == ("", "Yes.", 0)
    call = CALLS["HERMES"]
    assert reads(f"<think>Hm.</think>\n\n{call}", thoughts="possible") == ("Hm.", "", 1)
    assert reads(f"Hm. {call}", thoughts="begun") == ("Hm.", "", 1)
    for name in ("LLAMA", "general"):  # where the grammar has no other answer that begins so
        _, writing = writing_of(name)
        assert reads(CALLS[name], thoughts="begun") == ("", "", 1)
        assert reads("Hm.</think>{}", thoughts="begun") == ("Hm.", "{}", 0)
