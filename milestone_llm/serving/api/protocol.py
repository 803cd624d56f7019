"""Bodies of requests: the fields of OpenAI's API that are known here, and vLLM's beyond them.

Fields that are not known here are ignored, and the log names them, as vLLM's does. Those that ask
for what this server has not are refused.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from milestone_llm.structured import StructuredOutputsParams

from .errors import ApiError
from .structured import (
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
    call_params,
    structured_params,
    with_read_arguments,
)
from .unsupported import refuse_unsupported, unsupported, warn_of_unknown

MAX_LOGPROBS = 20
"""Most log-probabilities a token, as vLLM's: all of the vocabulary's would be megabytes a token."""
MAX_PROMPT_LOGPROBS = 2**17
"""Most of them in one answer, of all prompt tokens (`echo`): more would take seconds to write."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str, Field(max_length=1024)]
TokenIds = Annotated[list[Whole], Field(fail_fast=True)]


def _by_token_id(value: Any) -> Any:
    """A JSON object with token ids for names, which are texts."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"it has {len(value)} token ids, and may have {MAX_LOGIT_BIASES} at most")
    for token_id in value:
        if not token_id.isdecimal() or len(token_id) > 18:
            raise ValueError(f"{token_id!r:.200} is no token id")
    return {int(token_id): bias for token_id, bias in value.items()}


LogitBias = Annotated[dict[Whole, float], BeforeValidator(_by_token_id)]


class Body(BaseModel):
    """What all bodies have in common: a number in quotes is no number."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Name | None = None
    """None: the one that is served."""

    @model_validator(mode="before")
    @classmethod
    def _look_at_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            refuse_unsupported(data, cls.model_fields)
            warn_of_unknown(data, cls.model_fields)
        return data


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: bool | None = None
    """Whether one more event tells the numbers of tokens."""


class Sampling(Body):
    """What completions and chats have in common. None: as if the field were not there."""

    id_prefix: ClassVar[str]
    """Of the ids of its answers."""

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
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Name | None = Field(None, min_length=1)
    """Only requests with the same share KV through the prefix cache."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Name | None = None
    priority: Whole | None = None
    deadline: float | None = Field(None, gt=0)
    """Seconds after which the answer is of no use any more: a 504 comes instead."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            text = "stream_options is for streams: it needs stream=true"
            raise ApiError(400, text, param="stream_options")
        return self

    def sampling_params(
        self, max_tokens: int, logprobs: int | None, key_salt: str, **others: Any
    ) -> SamplingParams:
        """What the engine is asked for.

        Args:
            logprobs: likeliest tokens to name beside each token of the output; None: none.
            key_salt: of the client's key. No salt of its own takes a client to another key's.

        Raises:
            ApiError: a value is out of range; the message states the value and the range.
        """
        known = {field.name for field in fields(SamplingParams)}
        given = {name: value for name, value in self if name in known and value is not None}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, **others}
        given["cache_salt"] = key_salt + (self.cache_salt or "")
        given["structured_outputs"] = self.structured_params()
        try:
            return SamplingParams(**given)
        except InputError as error:
            raise ApiError(400, str(error), param=str(error).split()[0]) from None

    def structured_params(self) -> StructuredOutputsParams | None:
        """What the answer has to look like.

        Raises:
            ApiError: fields that say so contradict each other, or one of them is not whole.
        """
        return structured_params(self.response_format, self.structured_outputs)

    @property
    def rule_param(self) -> str:
        """The field that says what the answer has to look like."""
        return "structured_outputs"

    @property
    def wants_usage_event(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
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
    """To texts; None: yes."""

    def prompt_texts(self) -> list[str]:
        """Texts of its prompts; none if they are token ids."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [prompt for prompt in prompts if isinstance(prompt, str)]

    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt or several, as several.

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
        """How `Service.encode` makes tokens of its prompts."""
        return {"param": "prompt", "adds_special": self.add_special_tokens is not False}

    def params(self, room: int, key_salt: str) -> SamplingParams:
        """What the engine is asked for; `room` is for chats.

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
        return self.sampling_params(max_tokens, self.logprobs, key_salt, **others)

    def check_prompt_logprobs(self, num_tokens: int) -> None:
        """Refuse what nobody could be answered beside.

        Args:
            num_tokens: of all prompts, which are echoed.

        Raises:
            ApiError: the answer would name too many tokens.
        """
        count = 0 if self.logprobs is None else num_tokens * (self.n or 1) * (1 + self.logprobs)
        if count > MAX_PROMPT_LOGPROBS:
            text = f"echo of {num_tokens:,} prompt tokens with logprobs={self.logprobs} and "
            text += f"n={self.n or 1} is {count:,} log-probabilities, and an answer has at most "
            text += f"{MAX_PROMPT_LOGPROBS:,}: send fewer prompts at a time, or ask for fewer"
            raise ApiError(400, text, param="logprobs")


class Part(BaseModel):
    """A part of a message's content. There is text, and nothing else."""

    type: Name
    text: str | None = None


class Message(BaseModel):
    """A message of a chat; what else it has goes to the model's chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Name
    """Of any name, as in vLLM: the chat template refuses those that it does not take."""
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role in ("developer", "system", "tool", "user"):
            raise ValueError(f"a message of role {self.role} needs a content")
        return self

    @property
    def num_characters(self) -> int:
        """Of all that a chat template could show."""
        content = self.content
        texts = [part.text for part in content] if isinstance(content, list) else content
        return num_characters([self.role, texts, self.model_extra])

    def as_text(self, index: int) -> dict[str, Any]:
        """The message for a chat template, its content one text.

        Raises:
            ApiError: a part is an image or anything else but text.
        """
        message = {"role": self.role, **(self.model_extra or {})}
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    where = f"messages.{index}.content"
                    text = f"{where}: parts of type {part.type} are not supported, only text"
                    raise ApiError(400, text, param="messages")
            return {**message, "content": "".join(part.text or "" for part in self.content)}
        return {**with_read_arguments(message), "content": self.content or ""}


def num_characters(value: Any) -> int:
    """Of all texts in a value of JSON; whatever else is there counts as one."""
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

    def prompt_texts(self) -> list[str]:
        """What was said last."""
        content = self.messages[-1].content
        return [content] if isinstance(content, str) else []

    def prompts(self) -> list[list[Message]]:
        """Its messages, the only prompt."""
        return [self.messages]

    def encoding(self) -> dict[str, Any]:
        """How `Service.encode` makes tokens of its messages."""
        variables = self.chat_template_kwargs
        return {"param": "messages", "template_kwargs": variables, "tools": self.shown_tools}

    def params(self, room: int, key_salt: str) -> SamplingParams:
        """What the engine is asked for.

        Args:
            room: tokens that it may have after the prompt, if it does not say how many it wants.

        Raises:
            ApiError: a value is out of range.
        """
        max_tokens = self.max_completion_tokens or self.max_tokens
        max_tokens = room if max_tokens is None else max_tokens
        return self.sampling_params(max_tokens, self.num_logprobs, key_salt)

    @property
    def rule_param(self) -> str:
        """The field that says what the answer has to look like."""
        return "tools" if self.calls_tool else super().rule_param

    @property
    def calls_tool(self) -> bool:
        """Whether the answer is a call of a function."""
        return call_params(self.tools, self.tool_choice) is not None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """What the chat template is told of: nothing where none may be called."""
        if not self.calls_tool:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    def structured_params(self) -> StructuredOutputsParams | None:
        """What the answer has to look like.

        Raises:
            ApiError: fields that say so contradict each other, or one of them is not whole.
        """
        call, other = call_params(self.tools, self.tool_choice), super().structured_params()
        if call is not None and other is not None:
            text = "a call of a function has its own form: give no response_format and no "
            raise ApiError(400, f"{text}structured_outputs beside tools", param="tools")
        return call or other

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs` says whether, `top_logprobs` how many."""
        if self.top_logprobs and not self.logprobs:
            text = f"top_logprobs={self.top_logprobs} needs logprobs=true"
            raise ApiError(400, text, param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a prompt, or messages as a chat would send them."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """To a prompt; None: yes. A chat has those of its template."""
    chat_template_kwargs: dict[str, Any] | None = None

    def only_prompt(self) -> tuple[str | list[Message], str]:
        """What is given of the two, and its name.

        Raises:
            ApiError: both are, or none.
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
