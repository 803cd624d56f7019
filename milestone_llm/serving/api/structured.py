"""Fields that constrain an answer's text, function calls among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from milestone_llm.core.errors import InputError
from milestone_llm.structured import StructuredOutputsParams

from .calls import CallWriting
from .errors import ApiError

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
    schema_: Any = Field(None, alias="schema")
    """llama.cpp's place for a schema."""

    @property
    def has_stray_schema(self) -> bool:
        """Whether it has a schema that this type does not use."""
        is_used = self.type == "json_schema"
        return self.schema_ is not None or (self.json_schema is not None and not is_used)


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


class NamedTool(BaseModel):
    """One of `AllowedTools`."""

    type: Literal["function"]
    function: Named


class SomeTools(BaseModel):
    """Names the tools that may be called. The model is shown all of them, so that a prompt of the
    same tools is found in the prefix cache."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(BaseModel):
    """OpenAI's type: a choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedTools


def structured_params(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """Return the constraint on the answer's text; None: there is none.

    Raises:
        ApiError: both fields have a constraint, or one of them is incomplete.
    """
    given: dict[str, Any] = {}
    if response_format is not None and response_format.has_stray_schema:
        text = "response_format has a schema that would be left out: give type json_schema, and "
        raise ApiError(400, f"{text}json_schema.schema", param="response_format")
    if response_format is not None and response_format.type == "json_object":
        given["json_object"] = True
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            text = "response_format of type json_schema needs json_schema.schema"
            raise ApiError(400, text, param="response_format")
        wanted = response_format.json_schema
        given["json"] = wanted.schema_ if wanted.strict else _lenient(wanted.schema_)
    ours = structured_outputs and structured_outputs.model_dump(by_alias=True, exclude_none=True)
    if given and ours:
        text = "give either response_format or structured_outputs"
        raise ApiError(400, text, param="structured_outputs")
    if ours:
        return _params("structured_outputs", **ours)
    return _params("response_format", **given) if given else None


class RulePart(NamedTuple):
    """A part of the constraint on an answer's text that has a schema of its own."""

    param: str
    """Field of the body that has it."""
    name: str
    """What errors call it."""
    params: StructuredOutputsParams


@dataclass(frozen=True)
class Calls:
    """The calls that an answer may have."""

    functions: list[Function]
    is_required: bool
    """Whether the answer has to be a call. If not, it may be words."""
    is_parallel: bool
    """Whether the answer may have several."""

    def params(
        self, words: StructuredOutputsParams | None, writing: CallWriting
    ) -> StructuredOutputsParams:
        """Return the constraint on the answer's text.

        Args:
            words: the constraint on an answer in words.
            writing: how the model writes calls.

        Raises:
            ApiError: words with this constraint cannot be told from a call, or the schema of some
                function's arguments is not valid.
        """
        schema = None
        if words is not None:
            schema = {"type": "object"} if words.json_object else json.loads(str(words.json or 0))
            if self.is_required or not schema or not writing.has_mark:
                text = "a call of a function has its own form: give no response_format and no "
                text += "structured_outputs beside tools"
                if not self.is_required:
                    text += " (this model's calls have no mark that tells them from other JSON)"
                raise ApiError(400, text, param="tools")
        functions = [(each.name, _arguments(each)) for each in self.functions]
        grammar = writing.grammar(functions, self.is_required, self.is_parallel, schema)
        return _params("tools", grammar=grammar)

    def rule_parts(self) -> list[RulePart]:
        """Return the schemas of the functions' arguments."""
        return [
            RulePart(
                "tools",
                f"tools: parameters of {each.name}",
                _params("tools", json=_arguments(each)),
            )
            for each in self.functions
        ]


def calls_of(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, is_parallel: bool | None
) -> Calls | None:
    """Return the calls that an answer may have; None: no function may be called.

    Raises:
        ApiError: there is no function of a name, or there are two.
    """
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    functions: dict[str, Function] = {}
    for tool in tools or ():
        if functions.setdefault(tool.function.name, tool.function) is not tool.function:
            text = f"tools has two functions with the name {tool.function.name!r}"
            raise ApiError(400, text, param="tools")
    if not functions:
        raise ApiError(400, "tool_choice needs tools, and there are none", param="tool_choice")
    wanted, is_required = list(functions), choice not in (None, "auto")
    if isinstance(choice, NamedChoice):
        wanted = [choice.function.name]
    elif isinstance(choice, AllowedTools):
        wanted = [tool.function.name for tool in choice.allowed_tools.tools]
        is_required = choice.allowed_tools.mode == "required"
    if missing := [name for name in wanted if name not in functions]:
        text = f"tool_choice names {missing[0]!r}; tools has {', '.join(functions)}"
        raise ApiError(400, text, param="tool_choice")
    return Calls([functions[name] for name in wanted], is_required, bool(is_parallel))


def _params(param: str, **given: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**given)
    except InputError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None


def _arguments(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments: clients take them by name, so they are an
    object."""
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        text = f"tools: parameters of {function.name} must have the type object, got {kinds!r:.200}"
        raise ApiError(400, text, param="tools")
    of_object = {**schema, "type": "object"}
    lenient = of_object if function.strict else _lenient(of_object)
    assert isinstance(lenient, dict)
    return lenient


def _lenient(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return a schema that gives llguidance leave to leave out what it does not know."""
    if isinstance(schema, bool) or not isinstance(schema.get("x-guidance", {}), dict):
        return schema
    return {**schema, "x-guidance": {"lenient": True, **schema.get("x-guidance", {})}}
