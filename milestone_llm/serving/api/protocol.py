"""Bodies of requests: fields of OpenAI's API, and vLLM's additional ones.

Unknown fields are ignored and logged, as in vLLM. Fields that ask for what this server does not
support are rejected.
"""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from milestone_llm.structured import StructuredOutputsParams

from .calls import AnswerReader, CallWriting, Thoughts
from .errors import ApiError, field_named_first
from .structured import (
    Calls,
    ResponseFormat,
    RulePart,
    StructuredOutputs,
    Tool,
    ToolChoice,
    calls_of,
    structured_params,
)
from .unsupported import refuse_unsupported, unsupported, warn_of_unknown

MAX_LOGPROBS = 20
"""Most log-probabilities for a token, as in vLLM. For the whole vocabulary they would be
megabytes."""
MAX_PROMPT_LOGPROBS = 2**17
"""Most log-probabilities of prompt tokens (`echo`) in one answer: more would take seconds to
write."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str, Field(max_length=1024)]
TokenIds = Annotated[list[Whole], Field(fail_fast=True)]


def _by_token_id(value: Any) -> Any:
    """Turn the keys of a JSON object, which are texts, into token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"it has {len(value)} token ids, and may have {MAX_LOGIT_BIASES} at most")
    for token_id in value:
        if not re.fullmatch("0|[1-9][0-9]{0,17}", token_id):
            raise ValueError(f"{token_id!r:.200} is no token id")
    return {int(token_id): bias for token_id, bias in value.items()}


LogitBias = Annotated[dict[Whole, float], BeforeValidator(_by_token_id)]


class Body(BaseModel):
    """Base of all bodies: a number in quotes is not accepted as a number."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Name | None = None
    """Name of the model; None: the one that is served."""

    @model_validator(mode="before")
    @classmethod
    def _look_at_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            refuse_unsupported(data, cls.model_fields)
            warn_of_unknown(data, cls.model_fields)
        return data


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    """Whether the last event of the stream has the numbers of tokens."""
    continuous_usage_stats: Literal[False] | None = None
    """vLLM's: whether all events have them, which they have not here."""


class Sampling(Body):
    """Fields that completions and chats share. None: as if the field were missing."""

    id_prefix: ClassVar[str]
    """How the ids of its answers begin."""

    n: Whole | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Whole | None = None
    max_tokens: Whole | None = Field(None, ge=0)
    min_tokens: Whole | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Name | None = Field(None, min_length=1)
    """Requests share KV in the prefix cache only if they have the same salt."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Name | None = None
    priority: Whole | None = None
    deadline: float | None = Field(None, gt=0)
    """Seconds after which the client no longer needs the answer: it gets a 504 instead."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            text = "stream_options is for streams: it needs stream=true"
            raise ApiError(400, text, param="stream_options")
        return self

    def sampling_params(
        self,
        max_tokens: int,
        logprobs: int | None,
        key_salt: str,
        writing: CallWriting,
        **others: Any,
    ) -> SamplingParams:
        """Return the sampling parameters for the engine.

        Args:
            logprobs: number of likeliest tokens reported for each output token; None: none.
            key_salt: salt of the client's key. It comes first, so that no `cache_salt` of a client
                reaches the prefixes of another key.
            writing: how the model writes calls of functions.

        Raises:
            ApiError: a value is out of range; the message states the value and the range.
        """
        known = {field.name for field in fields(SamplingParams)}
        given = {name: value for name, value in self if name in known and value is not None}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, **others}
        given["cache_salt"] = key_salt + (self.cache_salt or "")
        given["structured_outputs"] = self.structured_params(writing)
        try:
            return SamplingParams(**given)
        except InputError as error:
            raise ApiError(400, str(error), param=field_named_first(str(error))) from None

    def structured_params(self, writing: CallWriting) -> StructuredOutputsParams | None:
        """Return the constraint on the answer's text, if there is one.

        Raises:
            ApiError: two fields contradict each other, or one of them is incomplete.
        """
        return structured_params(self.response_format, self.structured_outputs)

    @property
    def words_param(self) -> str:
        """Name of the field that constrains an answer in words."""
        is_free = self.response_format is None or self.response_format.type == "text"
        return "structured_outputs" if is_free else "response_format"

    @property
    def rule_param(self) -> str:
        """Name of the field that constrains the answer's text."""
        return self.words_param

    def rule_parts(self) -> list[RulePart]:
        """Return the parts of the constraint, for an error that names the one to blame."""
        words = structured_params(self.response_format, self.structured_outputs)
        return [RulePart(self.words_param, self.words_param, words)] if words else []

    @property
    def wants_usage_event(self) -> bool:
        """Whether a stream ends with an event that has the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Sampling):
    """Body of `POST /v1/completions`."""

    id_prefix = "cmpl"
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    """Whether to add special tokens to prompts that are texts; None: yes."""

    def prompt_texts(self) -> list[str]:
        """Return the prompts that are texts; none if they are token ids."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [prompt for prompt in prompts if isinstance(prompt, str)]

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list, also if there is only one.

        Raises:
            ApiError: there is none.
        """
        if not self.prompt:
            raise ApiError(400, "prompt is empty: it needs at least 1 token", param="prompt")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def encoding(self) -> dict[str, Any]:
        """Return the arguments with which `Service.encode` tokenizes its prompts."""
        return {"param": "prompt", "adds_special": self.add_special_tokens is not False}

    def params(self, room: int, key_salt: str, writing: CallWriting) -> SamplingParams:
        """Return the sampling parameters for the engine. `room` is for chats, and not used here.

        Raises:
            ApiError: a value is out of range.
        """
        others: dict[str, Any] = {}
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        if max_tokens == 0:
            if not self.echo:
                text = "max_tokens must be at least 1, got 0 (0 is for echo, to score a prompt)"
                raise ApiError(400, text, param="max_tokens")
            max_tokens = 1
        if self.echo and self.logprobs is not None:
            others["prompt_logprobs"] = self.logprobs
        return self.sampling_params(max_tokens, self.logprobs, key_salt, writing, **others)

    def check_prompt_logprobs(self, num_tokens: int) -> None:
        """Reject a request whose answer would have too many prompt log-probabilities.

        Args:
            num_tokens: tokens of all prompts together, which are echoed.

        Raises:
            ApiError: there would be more than `MAX_PROMPT_LOGPROBS`.
        """
        count = 0 if self.logprobs is None else num_tokens * (self.n or 1) * (1 + self.logprobs)
        if count > MAX_PROMPT_LOGPROBS:
            text = f"echo of {num_tokens:,} prompt tokens with logprobs={self.logprobs} and "
            text += f"n={self.n or 1} is {count:,} log-probabilities, and an answer has at most "
            text += f"{MAX_PROMPT_LOGPROBS:,}: send fewer prompts at a time, or ask for fewer"
            raise ApiError(400, text, param="logprobs")


class Part(BaseModel):
    """A part of a message's content. `render_chat` takes only text."""

    type: Name
    text: str | None = None
    refusal: str | None = None
    """OpenAI's type for an answer that declines."""


class Message(BaseModel):
    """A message of a chat. Further fields go to the model's chat template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Name
    """Any name: `render_chat` rejects messages that the chat template does not show."""
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None

    @property
    def num_characters(self) -> int:
        """Number of characters of all texts that a chat template could show."""
        content: Any = self.content
        if isinstance(content, list):
            content = [text for part in content for text in (part.text, part.refusal)]
        return num_characters([self.role, content, self.model_extra])

    def as_dict(self) -> dict[str, Any]:
        """Return the message as `render_chat` takes it."""
        content: Any = self.content
        if isinstance(content, list):
            content = [part.model_dump(exclude_none=True) for part in content]
        return {"role": self.role, "content": content, **(self.model_extra or {})}


def num_characters(value: Any) -> int:
    """Count the characters of all texts in a JSON value; every other value counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return sum(map(num_characters, value)) if isinstance(value, list) else 1


class ChatRequest(Sampling):
    """Body of `POST /v1/chat/completions`."""

    id_prefix = "chatcmpl"
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, such as `enable_thinking`."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; None: it has one at most."""
    reasoning_effort: Name | None = None
    verbosity: Name | None = None
    """This and `reasoning_effort` are variables of the chat template."""

    def prompt_texts(self) -> list[str]:
        """Return the content of the last message, if it is a text."""
        content = self.messages[-1].content
        return [content] if isinstance(content, str) else []

    def prompts(self) -> list[list[Message]]:
        """Return the messages, which are the only prompt."""
        return [self.messages]

    def encoding(self) -> dict[str, Any]:
        """Return the arguments with which `Service.encode` tokenizes its messages."""
        given = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        variables = {name: value for name, value in given.items() if value is not None}
        variables |= self.chat_template_kwargs or {}
        return {"param": "messages", "template_kwargs": variables, "tools": self.shown_tools}

    def params(self, room: int, key_salt: str, writing: CallWriting) -> SamplingParams:
        """Return the sampling parameters for the engine.

        Args:
            room: tokens that fit after the prompt: the limit, if the request has none.
            writing: how the model writes calls of functions.

        Raises:
            ApiError: a value is out of range.
        """
        max_tokens = self.max_completion_tokens or self.max_tokens
        max_tokens = room if max_tokens is None else max_tokens
        return self.sampling_params(max_tokens, self.num_logprobs, key_salt, writing)

    @property
    def rule_param(self) -> str:
        """Name of the field that constrains the answer's text."""
        return "tools" if self.calls else self.words_param

    def rule_parts(self) -> list[RulePart]:
        """Return the parts of the constraint, for an error that names the one to blame."""
        return super().rule_parts() + (self.calls.rule_parts() if self.calls else [])

    @cached_property
    def calls(self) -> Calls | None:
        """The calls that the answer may have; None if no function may be called.

        Raises:
            ApiError: `tool_choice` names a function that is not there.
        """
        return calls_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template shows to the model; None if none may be called."""
        if self.calls is None:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    def structured_params(self, writing: CallWriting) -> StructuredOutputsParams | None:
        """Return the constraint on the answer's text, if there is one.

        Raises:
            ApiError: two fields contradict each other, or one of them is incomplete.
        """
        words = super().structured_params(writing)
        if self.calls is None:
            return words
        if self.skip_special_tokens is False and writing.has_hidden:
            text = "skip_special_tokens=false would hide this model's calls among words: give no "
            raise ApiError(
                400, f"{text}skip_special_tokens beside tools", param="skip_special_tokens"
            )
        return self.calls.params(words, writing)

    def reader(self, writing: CallWriting, thoughts: Thoughts) -> AnswerReader | None:
        """Return what finds thoughts and calls in an answer; None if it can have none.

        Args:
            writing: how the model writes calls of functions.
            thoughts: whether the model may think before it answers in free words.
        """
        calls, has_form = self.calls, super().structured_params(writing) is not None
        has_words = not has_form and (calls is None or not calls.is_required)
        thoughts = thoughts if has_words else "none"
        if calls is None and thoughts == "none":
            return None
        return AnswerReader(writing, has_words, calls is not None, thoughts)

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported for each output token: `logprobs` switches them on,
        `top_logprobs` gives the number."""
        if self.top_logprobs and not self.logprobs:
            text = f"top_logprobs={self.top_logprobs} needs logprobs=true"
            raise ApiError(400, text, param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a prompt, or messages as a chat would send them."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Whether to add special tokens to `prompt`; None: yes. A chat has those of its template."""
    chat_template_kwargs: dict[str, Any] | None = None

    def only_prompt(self) -> tuple[str | list[Message], str]:
        """Return the prompt or the messages, and the name of that field.

        Raises:
            ApiError: both are given, or none.
        """
        if self.prompt is not None and not self.messages:
            if self.chat_template_kwargs:
                raise unsupported("chat_template_kwargs")
            return self.prompt, "prompt"
        if not self.messages or self.prompt is not None:
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if self.add_special_tokens:
            raise unsupported("add_special_tokens")
        return self.messages, "messages"


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    tokens: TokenIds
