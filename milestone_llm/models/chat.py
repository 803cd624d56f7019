"""Turn conversations into prompts with a tokenizer's chat template. Nothing here imports torch.

Templates disagree about what a conversation is, and many leave out what they do not know without a
word. So `render_chat` brings all messages into one form first. Then it renders the conversation
with marks in place of what must not be lost. What does not show is written in another way that the
template does show, or the conversation is refused.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from milestone_llm.core.errors import InputError

from .call_form import call_form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]

_FUNCTIONS = """\
You can call the functions below. To call one, answer only with JSON of this form:
{"name": "the function's name", "arguments": {"the argument's name": "its value"}}
"""


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Json],
    template_kwargs: Mapping[str, Any] | None = None,
    tools: list[Json] | None = None,
) -> list[int]:
    """Return the token ids of a conversation. They end where the assistant's answer begins.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        messages: such as `[{"role": "user", "content": "Hello"}]`. A content may be a list of parts
            such as `{"type": "text", "text": "Hello"}`, which are joined with newlines. Arguments
            of `tool_calls` may be JSON texts, as in OpenAI's API, or objects.
        template_kwargs: variables of the chat template, such as `enable_thinking`.
        tools: functions that the model may call. If the template does not show them, they are put
            into the system message.

    Raises:
        InputError: there is no tokenizer, no chat template, or no message; a message is malformed;
            the template does not accept the messages or leaves one out; or a variable has the name
            of an option of `apply_chat_template`.
    """
    if tokenizer is None:
        raise InputError("a chat needs a tokenizer, and this model was loaded without one")
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
            "give the prompt as plain text or as token ids"
        )
    if not messages:
        raise InputError("a chat needs at least one message, got 0")
    variables = template_kwargs or {}
    options = inspect.signature(tokenizer.apply_chat_template).parameters if variables else {}
    if taken := [name for name in variables if name in options]:
        raise InputError(
            f"chat_template_kwargs is for variables that a chat template has of its own, and "
            f"{taken[0]} is an option of apply_chat_template"
        )
    plain = [_plain_message(message, f"messages.{at}") for at, message in enumerate(messages)]
    chat = _as_shown(_Chat(tokenizer, variables, _with_results_in_order(plain), tools))
    return list(chat.render(tokenize=True))


# --- one form for all messages ------------------------------------------------------------------


def _plain_message(message: Json, where: str) -> Json:
    """Return a message with a text as its content and objects as its calls' arguments.

    Raises:
        InputError: it has no role or no content, a part that is not text, or a malformed or old
            form of a call.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where} needs a role, such as 'user', got {role!r:.200}")
    if message.get("function_call"):
        raise InputError(
            f"{where}.function_call is the old form of a call: give it as one of tool_calls, and "
            "its result as a message of the role tool"
        )
    plain = {**message, "content": _text_of(message.get("content"), role, where)}
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = _read_calls(calls, f"{where}.tool_calls")
    return plain


def _text_of(content: Any, role: str, where: str) -> str:
    """Return a content as one text. Only an assistant's may be missing: its message may be a
    call."""
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}: a message of role {role} needs a content, got {content!r:.200}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise InputError(
                f"{where}.content: parts of type {kind!s:.200} are not supported, only text"
            )
        if not isinstance(part.get(kind), str):
            raise InputError(f"{where}.content: a part of type {kind} has no {kind}")
        texts.append(part[kind])
    return "\n".join(texts)


def _read_calls(calls: Any, where: str) -> list[Json]:
    try:
        return [{**call, "function": _read(call["function"])} for call in calls]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{where} is a list of calls, each with function.name and function.arguments, "
            f"a JSON text of an object: {type(error).__name__}: {error}"
        ) from None


def _read(function: Json) -> Json:
    """Return a function with its arguments as an object."""
    if not isinstance(function["name"], str):
        raise TypeError(f"the name is {function['name']!r:.200}")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise TypeError(f"the arguments are {arguments!r:.200}")
    named = {"name": function["name"], "arguments": arguments}  # in the order of all forms
    return {**named, **{key: value for key, value in function.items() if key not in named}}


def _with_results_in_order(messages: list[Json]) -> list[Json]:
    """Return the messages with the results of functions in the order of their calls: many templates
    do not show ids. A result without an id comes after those with one.

    Raises:
        InputError: an id is not that of a call in the assistant's message before.
    """
    turn, calls, open_calls = 0, [], []
    places = []
    for at, message in enumerate(messages):
        call_id = message.get("tool_call_id")
        if message["role"] != "tool":
            turn += 1
            calls = [call.get("id") for call in message.get("tool_calls", ())]
            open_calls = [*calls]
            places.append((turn, -1))
        elif call_id is None:
            places.append((turn, len(calls) + at))
        elif call_id in open_calls:
            open_calls.remove(call_id)
            places.append((turn, calls.index(call_id)))
        else:
            raise InputError(
                f"messages.{at}: tool_call_id {call_id!r:.200} is not the id of a call in the "
                "message before, or that call has a result already"
            )
    in_order = sorted(range(len(messages)), key=places.__getitem__)
    return [messages[at] for at in in_order]


# --- what the template shows --------------------------------------------------------------------


@dataclass(frozen=True)
class _Chat:
    """All that a chat template is given."""

    tokenizer: PreTrainedTokenizerBase
    variables: Mapping[str, Any]
    messages: list[Json]
    tools: list[Json] | None

    def render(self, tokenize: bool) -> Any:
        """Return the prompt, as token ids or as a text."""
        try:
            # return_dict=False: since transformers 5 the default is a BatchEncoding.
            return self.tokenizer.apply_chat_template(
                self.messages,
                tools=self.tools,
                add_generation_prompt=True,
                tokenize=tokenize,
                return_dict=False,
                **self.variables,
            )
        except Exception as error:  # a template's code may raise anything
            raise InputError(f"the chat template does not take these messages: {error}") from error


def _as_shown(chat: _Chat) -> _Chat:
    """Return a conversation of which the template shows everything.

    Users' and assistants' texts are known to every template. All else may be left out: other roles
    (`developer`, or one that is misspelt), calls, tools.

    Raises:
        InputError: it leaves something out that cannot be said in another way, or refuses it.
    """
    given = chat.messages
    if chat.tools and call_form(chat.tokenizer) is None:
        chat = _with_tools_as_system(_with_calls_as_text(chat))
    try:
        hidden = _hidden(chat)
    except InputError:
        chat = _with_short_ids(chat)
        has_developer = any(message["role"] == "developer" for message in chat.messages)
        hidden = {"developer": 0} if has_developer else _hidden(chat)
    for name, rewritten in (
        ("developer", _with_developer_as_system),
        ("tool_calls", _with_calls_as_text),
        ("tools", _with_tools_as_system),
    ):
        if name in hidden:
            chat = rewritten(chat)
            hidden = _hidden(chat)
    for place in hidden.values():
        place -= len(chat.messages) - len(given)  # a system message may have been added
        raise InputError(
            f"messages.{place}: the chat template of this model does not show a message of role "
            f"{given[place]['role']!r:.200} at this place"
        )
    return chat


def _hidden(chat: _Chat) -> dict[str, int]:
    """Render a conversation with marks in it. Return what has one that does not show: the role of a
    message, `tool_calls` or `tools`, each with the place of its message.

    Raises:
        InputError: the template does not take the conversation.
    """
    marks: dict[str, tuple[str, int]] = {}

    def mark(name: str, place: int = 0) -> str:
        text = f"Mark{len(marks)}kraM"
        marks[text] = name, place
        return text

    messages = []
    for place, message in enumerate(chat.messages):
        if message["role"] not in ("user", "assistant"):
            message = {**message, "content": mark(message["role"], place)}
        if calls := message.get("tool_calls"):
            marked = [_renamed(call, mark("tool_calls", place)) for call in calls]
            message = {**message, "tool_calls": marked}
        messages.append(message)
    tools = [_renamed(tool, mark("tools")) for tool in chat.tools or ()]
    if not marks:
        return {}
    prompt = replace(chat, messages=messages, tools=tools or None).render(tokenize=False)
    missing = [found for text, found in marks.items() if text not in prompt]
    return dict(missing[::-1])  # the first place counts


def _renamed(tool_or_call: Json, name: str) -> Json:
    return {**tool_or_call, "function": {**tool_or_call["function"], "name": name}}


def _with_developer_as_system(chat: _Chat) -> _Chat:
    """`developer` is what OpenAI calls `system` since its reasoning models."""
    messages = [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def _with_short_ids(chat: _Chat) -> _Chat:
    """Cut the ids of calls to nine letters and digits: Mistral's templates take no others."""

    def short(call_id: Any) -> str:
        return re.sub(r"[^a-zA-Z0-9]", "", str(call_id))[-9:].zfill(9)

    messages = []
    for message in chat.messages:
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": short(call.get("id"))} for call in calls]
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        messages.append(message)
    return replace(chat, messages=messages)


def _with_calls_as_text(chat: _Chat) -> _Chat:
    """Write calls as the server's grammar makes a model write them."""
    messages = []
    for message in chat.messages:
        message = dict(message)
        lines = [message["content"]] if message["content"] else []
        for call in message.pop("tool_calls", ()):
            function = {name: call["function"][name] for name in ("name", "arguments")}
            lines.append(json.dumps(function, ensure_ascii=False))
        messages.append({**message, "content": "\n".join(lines)})
    return replace(chat, messages=messages)


def _with_tools_as_system(chat: _Chat) -> _Chat:
    """Describe the functions in the system message, after what it says itself.

    Raises:
        InputError: the template has none.
    """
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in chat.tools or ()]
    text, messages = "\n".join([_FUNCTIONS, *functions]), chat.messages
    if messages[0]["role"] == "system":
        text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
    described = [{"role": "system", "content": text}, *messages]
    chat = replace(chat, messages=described, tools=None)
    if not _shows_system(chat):
        raise InputError(
            "tools: the chat template of this model shows neither tools nor a system message"
        )
    return chat


def _shows_system(chat: _Chat) -> bool:
    try:
        return _hidden(chat).get("system") != 0
    except InputError:
        return False
