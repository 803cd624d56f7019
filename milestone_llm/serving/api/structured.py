"""Fields that constrain an answer's text, function calls among them.

A function call is a grammar: the model has to write `{"name": "the_function", "arguments": {...}}`,
also if its chat template has another form for calls. So the text has the same form for all models,
and the client gets it as `tool_calls`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from milestone_llm.core.errors import InputError
from milestone_llm.structured import StructuredOutputsParams

from .errors import ApiError

_BEGIN = re.compile(r'\{"name": "([^"]*)", "arguments": ')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class JsonSchema(BaseModel):
    """OpenAI's type: a schema with a name."""

    name: str | None = Field(None, max_length=1024)
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None
    """True: the schema is refused if the grammar cannot say all of it. Else that is left out."""


class ResponseFormat(BaseModel):
    """OpenAI's field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's field `structured_outputs`: exactly one of these fields is given."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


# --- calls of functions ---------------------------------------------------------------------------


class Named(BaseModel):
    """The name of a function."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")


class Function(Named):
    """A function that a model may call. Further fields are for the chat template."""

    model_config = ConfigDict(extra="allow")

    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None: it has no arguments."""
    strict: bool | None = None
    """As that of `JsonSchema`."""


class Tool(BaseModel):
    """OpenAI's type: a tool, which is a function."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class NamedChoice(BaseModel):
    """A choice of one function that has to be called."""

    type: Literal["function"]
    function: Named


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def structured_params(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """Return the constraint on the answer's text; None: there is none.

    Raises:
        ApiError: both fields have a constraint, or one of them is incomplete.
    """
    given: dict[str, Any] = {}
    param = "response_format"
    if response_format is not None and response_format.type == "json_object":
        given["json_object"] = True
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            text = "response_format of type json_schema needs json_schema.schema"
            raise ApiError(400, text, param=param)
        wanted = response_format.json_schema
        given["json"] = wanted.schema_ if wanted.strict else _lenient(wanted.schema_)
    ours: dict[str, Any] = {}
    if structured_outputs is not None:
        ours = structured_outputs.model_dump(by_alias=True, exclude_none=True)
    if given and ours:
        text = "give either response_format or structured_outputs"
        raise ApiError(400, text, param="structured_outputs")
    if ours:
        param, given = "structured_outputs", ours
    return _params(param, **given) if given else None


def call_params(
    tools: Sequence[Tool] | None, choice: ToolChoice | None
) -> StructuredOutputsParams | None:
    """Return the constraint that the answer is a call of one of these functions; None: no call.

    Raises:
        ApiError: the choice is left to the model ("auto"), or there is no such function.
    """
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    functions = [tool.function for tool in tools or ()]
    if not functions:
        raise ApiError(400, "tool_choice needs tools, and there are none", param="tool_choice")
    if choice in (None, "auto"):
        text = 'tool_choice "auto" (which tools without tool_choice mean) is not supported by this '
        text += 'server: send "required", "none" or {"type": "function", "function": {"name": ...}}'
        raise ApiError(400, text, param="tool_choice")
    if isinstance(choice, NamedChoice):
        names = ", ".join(function.name for function in functions)
        functions = [each for each in functions if each.name == choice.function.name]
        if not functions:
            text = f"tool_choice names {choice.function.name!r}; tools has {names}"
            raise ApiError(400, text, param="tool_choice")
    return _params("tools", grammar=f"start: {' | '.join(map(_grammar, functions))}")


def _params(param: str, **given: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**given)
    except InputError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None


def _grammar(function: Function) -> str:
    """Return a call in Lark's notation. The schema has a root of its own, to which its `$ref`
    refer."""
    begin = json.dumps(f'{{"name": "{function.name}", "arguments": ')
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        text = f"tools: parameters of {function.name} must have the type object, got {kinds!r:.200}"
        raise ApiError(400, text, param="tools")
    of_object = {**schema, "type": "object"}  # clients take arguments by name
    wanted = of_object if function.strict else _lenient(of_object)
    return f'{begin} %json {json.dumps(wanted)} "}}"'


def _lenient(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return a schema that gives llguidance leave to leave out what it does not know."""
    if isinstance(schema, bool) or not isinstance(schema.get("x-guidance", {}), dict):
        return schema
    return {**schema, "x-guidance": {"lenient": True, **schema.get("x-guidance", {})}}


def read_call(text: str, is_ended: bool) -> tuple[str | None, str]:
    """Return the name of the function that a text calls, and its arguments, as far as they are
    there.

    Args:
        is_ended: whether the text is complete. If not, a bracket at the end may belong to the
            arguments or to the call.
    """
    if (begin := _BEGIN.match(text)) is None:
        return None, ""
    arguments = text[begin.end() :]
    if arguments.endswith("}") and (not is_ended or is_complete(arguments[:-1])):
        arguments = arguments[:-1]
    return begin[1], arguments


def is_complete(text: str) -> bool:
    """Return whether the beginning of a JSON object is all of it. It may be nested to any depth, so
    brackets are counted."""
    brackets = Counter(_STRING.sub("", text))
    depth = brackets["{"] + brackets["["] - brackets["}"] - brackets["]"]
    return bool(text) and depth == 0 and '"' not in brackets
