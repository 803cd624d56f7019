"""Bodies of requests: the fields of OpenAI's API that are known here, and vLLM's beyond them.

Fields that nobody knows are ignored, as OpenAI does. Fields that OpenAI or vLLM has and this server
has not are refused by name, unless their value asks for nothing: an answer that silently lacks its
tools would be worse than none.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams

from .errors import ApiError

MAX_LOGPROBS = 20
"""Most log-probabilities a token, as vLLM's: all of the vocabulary's would be megabytes a token."""
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # without tools
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known fields that are not supported, and the values besides null with which they do nothing."""


class Body(BaseModel):
    """What all bodies have in common: a number in quotes is no number."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    """None: the one that is served."""


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: bool | None = None
    """Whether one more event tells the numbers of tokens."""


class Sampling(Body):
    """What completions and chats have in common. None: as if the field were not there."""

    n: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    deadline: float | None = Field(None, gt=0)
    """Seconds after which the answer is of no use any more: a 504 comes instead."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, nothing in _ASKS_FOR_NOTHING.items():
            value = data.get(name) if isinstance(data, dict) else None
            if value is not None and value not in nothing:
                raise ApiError(400, f"{name} is not supported by this server", param=name)
        return data

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            text = "stream_options is for streams: it needs stream=true"
            raise ApiError(400, text, param="stream_options")
        return self

    def sampling_params(
        self, max_tokens: int, logprobs: int | None, **others: Any
    ) -> SamplingParams:
        """What the engine is asked for.

        Args:
            logprobs: likeliest tokens to name beside each token of the output; None: none.

        Raises:
            ApiError: a value is out of range; the message states the value and the range.
        """
        known = {field.name for field in fields(SamplingParams)}
        given = {name: value for name, value in self if name in known and value is not None}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, **others}
        try:
            return SamplingParams(**given)
        except InputError as error:
            raise ApiError(400, str(error), param=str(error).split()[0]) from None

    @property
    def wants_usage_event(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Sampling):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

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


class Part(BaseModel):
    """A part of a message's content. There is text, and nothing else."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a chat; what else it has goes to the model's chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[Part] | None = None

    def as_text(self, index: int) -> dict[str, Any]:
        """The message for a chat template, its content one text.

        Raises:
            ApiError: a part is an image or anything else but text.
        """
        message = self.model_dump(exclude={"content"})
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    where = f"messages.{index}.content"
                    text = f"{where}: parts of type {part.type} are not supported, only text"
                    raise ApiError(400, text, param="messages")
            return {**message, "content": "".join(part.text or "" for part in self.content)}
        return {**message, "content": self.content or ""}


class Chat(Body):
    """Messages of a chat."""

    messages: list[Message] = Field(min_length=1)

    def as_texts(self) -> list[dict[str, Any]]:
        """The messages for a chat template."""
        return [message.as_text(index) for index, message in enumerate(self.messages)]


class ChatRequest(Sampling, Chat):
    """Body of `POST /v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=1)

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
    messages: list[Message] | None = None


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    tokens: list[int]
