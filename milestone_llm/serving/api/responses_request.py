"""The body of `POST /v1/responses`, OpenAI's newer API, and the chat that it asks for.

What it has beyond chats is kept by OpenAI's server: earlier responses, files, tools of its own.
This server keeps nothing, so each request has all of the conversation, and the rest is refused by
name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from .errors import ApiError, wrong_field
from .protocol import ChatRequest, Name, Sampling, Whole

Json = dict[str, Any]

_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "logprobs": (False,),
    "max_tokens": (),  # max_output_tokens
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "response_format": (),  # text.format
    "structured_outputs": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that are not supported, and the values (besides null) that have no effect."""
_INCLUDABLE = {"reasoning.encrypted_content"}
"""What clients ask for in `include` and manage without."""


class TextFormat(BaseModel):
    """Form of the text: that of chats, without a level."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """OpenAI's field `text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(BaseModel):
    """OpenAI's field `reasoning`."""

    effort: str | None = None


class FunctionTool(BaseModel):
    """A function that a model may call, as this API writes it."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None


class ResponsesChat(ChatRequest):
    """The chat that such a body asks for. Errors name the body's own fields."""

    id_prefix = "resp"

    def encoding(self) -> dict[str, Any]:
        """Return the arguments with which `Service.encode` tokenizes its messages."""
        return {**super().encoding(), "param": "input"}

    @property
    def words_param(self) -> str:
        """Name of the field that constrains an answer in words."""
        param = super().words_param
        return "text" if param == "response_format" else param


class ResponsesRequest(Sampling):
    """Body of `POST /v1/responses`."""

    id_prefix = "resp"
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, so that a value of them is refused by `chat`.
    background: bool | None = None
    conversation: Any = None
    logprobs: bool | None = None
    previous_response_id: str | None = None
    prompt: Any = None
    top_logprobs: Whole | None = None
    truncation: str | None = None
    _places: list[str] = PrivateAttr(default_factory=list)
    """Where each message of the chat comes from: "instructions", or "input.3"."""

    def chat(self) -> ResponsesChat:
        """Return the chat that this asks for.

        Raises:
            ApiError: something is not supported, or malformed.
        """
        for name, nothing in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in nothing:
                raise ApiError(400, f"{name} is not supported by this server", param=name)
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise ApiError(400, f"include: {name:.100} is not supported", param="include")
        shared = Sampling.model_fields.keys() - {"logit_bias", "stream_options", *_REFUSED}
        fields = {name: getattr(self, name) for name in shared}
        fields |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_chat_tool(tool, at) for at, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self._format(),
            "verbosity": self.text.verbosity if self.text else None,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            chat = ResponsesChat.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            path, text = wrong_field(first["loc"], first)
            place = self.in_own_words(".".join(path)).replace(".function.", ".")
            param = "input" if path[0] == "messages" else path[0]
            raise ApiError(400, f"{place}: {text}", param=param) from None
        chat.logit_bias = self.logit_bias  # its keys are numbers already
        return chat

    def _format(self) -> Json | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return None
        if (wanted.schema_ is not None) != (wanted.type == "json_schema"):
            text = "text.format has a schema if its type is json_schema, and else none"
            raise ApiError(400, text, param="text")
        if wanted.type != "json_schema":
            return {"type": wanted.type}
        schema = {"schema": wanted.schema_, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}

    def in_own_words(self, text: str) -> str:
        """Return an error of the chat with the places of messages in this body."""
        text = re.sub(r"\bmessages\.(\d+)", lambda found: self._places[int(found[1])], text)
        return re.sub(r"^messages\b", "input", text)

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
            self._places.append("instructions")
        if isinstance(self.input, str):
            self._places.append("input")
            return [*messages, {"role": "user", "content": self.input}]
        for at, item in enumerate(self.input):
            try:
                _add_item(messages, item)
            except KeyError as error:
                raise ApiError(400, f"input.{at} has no {error}", param="input") from None
            except TypeError as error:
                raise ApiError(400, f"input.{at}: {error}", param="input") from None
            self._places += [f"input.{at}"] * (len(messages) - len(self._places))
        return messages


def _add_item(messages: list[Json], item: Json) -> None:
    """Add an item of `input`. An answer's reasoning, words and calls are one message.

    Raises:
        KeyError: it lacks a field.
        TypeError: it is of a type that is not supported.
    """
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call_output":
        content = _content(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind == "message" and (item["role"] == "tool" or item.get("tool_calls")):
        raise TypeError("calls and their results are items: function_call, function_call_output")
    elif kind == "message" and item["role"] != "assistant":
        messages.append({"role": item["role"], "content": _content(item["content"])})
    elif kind in ("message", "function_call", "reasoning"):
        is_new = kind == "message" and last is not None and last.keys() & {"content", "tool_calls"}
        if last is None or is_new:
            messages.append(last := {"role": "assistant"})
        if kind == "message":
            last["content"] = _content(item["content"])
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        elif text := "".join(part["text"] for part in item.get("content") or ()):
            last["reasoning_content"] = text
    else:
        raise TypeError(f"items of type {kind!s:.100} are not supported")


def _content(content: Any) -> Any:
    """Return a content in the form of chats."""
    if not isinstance(content, list):
        return content
    kinds = {"input_text": "text", "output_text": "text"}
    return [
        {**part, "type": kinds.get(part["type"], part["type"])} if isinstance(part, dict) else part
        for part in content
    ]


def _chat_tool(tool: FunctionTool, at: int) -> Json:
    if tool.type != "function":
        text = f"tools.{at}: only functions are supported, got {tool.type:.100}"
        raise ApiError(400, text, param="tools")
    function = {"name": tool.name, **(tool.model_extra or {})}
    return {"type": "function", "function": function}


def _chat_choice(choice: str | Json | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_chat_choice(tool) for tool in tools]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice
