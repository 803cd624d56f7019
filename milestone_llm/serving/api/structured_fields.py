"""`response_format` and `structured_outputs`: what an answer has to look like."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from milestone_llm.core.errors import InputError
from milestone_llm.structured import StructuredOutputsParams

from .errors import ApiError


class JsonSchema(BaseModel):
    """OpenAI's: a schema with a name."""

    name: str | None = Field(None, max_length=1024)
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's field."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's field: one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def structured_params(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What the engine is asked for; None: nothing.

    Raises:
        ApiError: both fields ask for something, or one of them is not whole.
    """
    given: dict[str, Any] = {}
    param = "response_format"
    if response_format is not None and response_format.type == "json_object":
        given["json_object"] = True
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            text = "response_format of type json_schema needs json_schema.schema"
            raise ApiError(400, text, param=param)
        given["json"] = response_format.json_schema.schema_
    if structured_outputs is not None and structured_outputs.model_fields_set:
        if given:
            text = "give either response_format or structured_outputs"
            raise ApiError(400, text, param="structured_outputs")
        param = "structured_outputs"
        given = structured_outputs.model_dump(by_alias=True)
    if not given:
        return None
    try:
        return StructuredOutputsParams(**given)
    except InputError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
