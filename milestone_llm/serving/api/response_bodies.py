"""Bodies of answers in the format of OpenAI's API: whole answers, and events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from milestone_llm.core.outputs import Logprob
from milestone_llm.frontend.outputs import CompletionOutput, RequestOutput

from .async_engine import ApiRequest
from .calls import AnswerPart, AnswerReader
from .errors import ApiError
from .protocol import ChatRequest, Sampling
from .token_texts import HALF, TokenText, TokenTexts, Vocabulary

Json = dict[str, Any]
MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""
_ASCII = json.JSONEncoder(separators=(",", ":"))


@dataclass(slots=True)
class _Shown:
    """How much of a choice has been sent to the client."""

    reader: AnswerReader | None
    """Finds thoughts and calls of functions; None: the answer is words."""
    num_characters: int = 0
    num_tokens: int = 0
    texts: TokenTexts | None = None
    """Texts of its tokens, whose log-probabilities are sent."""
    text_offset: int = 0
    """Where the next token begins in the text, its prompt included (`echo`)."""
    is_new: bool = True
    """Whether nothing has been sent yet."""
    is_ended: bool = False


@dataclass(slots=True)
class _Token:
    """A token with its log-probabilities."""

    token_id: int
    logprobs: dict[int, Logprob] | None
    """None: nothing comes before the first token of a prompt."""
    texts: dict[int, TokenText]
    """What it and the tokens in `logprobs` are called at its place."""
    offset: int
    """Where it begins in the text."""

    @property
    def own(self) -> TokenText:
        """Its own text."""
        return self.texts[self.token_id]


class ResponseBodies:
    """Writes the answer to one API request. For log-probabilities, it decodes tokens one by one.

    Args:
        body: the client's request.
        prompts: text before each choice's own (`echo`); empty texts without `echo`.
        vocabulary: names the tokens of log-probabilities.
        make_reader: makes what finds thoughts and calls in one choice; None: all of it is words.
    """

    def __init__(
        self,
        request: ApiRequest,
        request_id: str,
        model: str,
        body: Sampling,
        prompts: Sequence[str],
        vocabulary: Vocabulary,
        make_reader: Callable[[], AnswerReader | None] = lambda: None,
    ) -> None:
        self._wants_usage = body.wants_usage_event
        """Whether the last event of a stream has the numbers of tokens, and earlier ones null."""
        self._request = request
        self._is_chat = isinstance(body, ChatRequest)
        self._drops_output = not self._is_chat and body.max_tokens == 0  # only the prompt is wanted
        self._prompts = prompts
        self._vocabulary = vocabulary
        kind = "chat.completion" if self._is_chat else "text_completion"
        created = int(time.time())
        self._head = {"id": request_id, "object": kind, "created": created, "model": model}
        self._event_head = {**self._head, "object": kind + ".chunk" * self._is_chat}
        self._event_start = b"data: " + _ascii(self._event_head)[:-1] + b',"choices":['
        self._places = {state.request_id: at for at, state in enumerate(request.states)}
        self._shown = [_Shown(make_reader()) for _ in range(request.num_choices)]
        self._num_completion_tokens = 0

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were requested."""
        return self._request.states[0].params.logprobs is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield a whole answer (not a stream), at most one choice at a time."""
        before = _json(self._head)[:-1] + b',"choices":['
        for choice in self._choices(outputs, is_event=False):
            yield before + _json(choice)
            before = b","
        yield b'],"usage":' + _json(self._usage()) + b"}"

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the next events of a stream: one for each choice that has something new."""
        end = b'],"usage":null}\n\n' if self._wants_usage else b"]}\n\n"
        choices = self._choices(outputs, is_event=True)
        return b"".join(self._event_start + _ascii(choice) + end for choice in choices)

    def last_events(self) -> bytes:
        """Return what ends a stream: the numbers of tokens, if they are wanted, and a mark."""
        usage = {**self._event_head, "choices": [], "usage": self._usage()}
        return event(usage) * self._wants_usage + LAST_EVENT

    def error_event(self, error: ApiError) -> bytes:
        """Return the event of an error within a stream, its last."""
        return event(error.body())

    def _choices(self, outputs: Sequence[RequestOutput], is_event: bool) -> Iterator[Json]:
        """Yield what is new in each choice, and count it as sent."""
        n = self._request.num_choices // len(self._places)
        for output in outputs:
            place = self._places[output.request_id]
            for completion in output.outputs:
                index = place * n + completion.index
                shown = self._shown[index]
                if shown.is_ended:
                    continue
                finish_reason, stop_reason = completion.finish_reason, completion.stop_reason
                if finish_reason == "error":  # the error follows what came before it
                    finish_reason = None
                elif finish_reason == "stop" and self._drops_output:  # what stopped is not sent
                    finish_reason, stop_reason = "length", None
                if shown.reader is None:
                    parts = [AnswerPart(completion.text[shown.num_characters :])]
                    shown.num_characters = len(completion.text)
                else:
                    parts = shown.reader.read(completion.text, finish_reason is not None)
                    if finish_reason == "stop" and shown.reader.is_complete:
                        finish_reason = "tool_calls"
                if not self._drops_output:
                    self._num_completion_tokens += completion.num_tokens - shown.num_tokens
                is_role = self._is_chat and shown.is_new and shown.reader is None
                is_news = any(map(any, parts)) or finish_reason or is_role
                if is_news or (completion.logprobs and completion.num_tokens > shown.num_tokens):
                    choice = self._choice(index, parts, output, completion, is_event)
                    if stop_reason is not None:
                        choice["stop_reason"] = stop_reason
                    yield {**choice, "finish_reason": finish_reason}
                    shown.is_new, shown.is_ended = False, finish_reason is not None
                shown.num_tokens = completion.num_tokens

    def _choice(
        self,
        index: int,
        parts: list[AnswerPart],
        output: RequestOutput,
        completion: CompletionOutput,
        is_event: bool,
    ) -> Json:
        shown = self._shown[index]
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self._logprobs(index, output, completion)
        choice: Json = {"index": index, "logprobs": logprobs}
        if not self._is_chat:
            text = "" if self._drops_output else parts[0].words
            return {**choice, "text": self._prompts[index] * shown.is_new + text}
        message = _message(parts, is_whole=shown.reader is None or not is_event)
        if shown.is_new:
            message = {"role": "assistant", **message}
        return {**choice, "delta" if is_event else "message": message}

    def _usage(self) -> Json:
        states = self._request.states
        num_prompt_tokens = sum(len(state.prompt_token_ids) for state in states)
        num_cached_tokens = sum(state.metrics.num_cached_tokens for state in states)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }

    # -- log-probabilities -------------------------------------------------------------------

    def _logprobs(self, index: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        shown, tokens = self._shown[index], list[_Token]()
        if shown.is_new and output.prompt_logprobs is not None:
            tokens += self._prompt_tokens(self._prompts[index], output)
        if not self._drops_output:
            tokens += self._new_tokens(index, completion)
        if self._is_chat:
            return {"content": [self._chat_token(token) for token in tokens]}
        return {
            "tokens": [token.own.name for token in tokens],
            "token_logprobs": [
                token.logprobs and _finite(token.logprobs[token.token_id]) for token in tokens
            ],
            "top_logprobs": [_by_name(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _prompt_tokens(self, prompt: str, output: RequestOutput) -> Iterator[_Token]:
        """Yield the tokens of a prompt, and find them in its text: this is the client's own, which
        a tokenizer may have normalized, and which may lack its special tokens."""
        assert output.prompt_logprobs is not None
        texts, end = TokenTexts(self._vocabulary), 0
        for token_id, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            token = _Token(token_id, logprobs, texts.take(token_id, logprobs or ()), end)
            name, text = token.own.name, token.own.text
            # Next to a special token, a tokenizer may drop a space or add one.
            if name and (place := prompt.find(name, end, end + len(name) + 1)) >= 0:
                token.offset, end = place, place + len(name)
            else:
                end = min(end + len(text), len(prompt))
            yield token

    def _new_tokens(self, index: int, completion: CompletionOutput) -> list[_Token]:
        """Return the tokens that have not been sent."""
        shown = self._shown[index]
        if shown.texts is None:
            skips = self._request.states[0].params.skip_special_tokens
            shown.texts = TokenTexts(self._vocabulary, skips)
            shown.text_offset = len(self._prompts[index])
        new, tokens = slice(shown.num_tokens, None), []
        for token_id, logprobs in zip(
            completion.token_ids[new], (completion.logprobs or [])[new], strict=True
        ):
            texts = shown.texts.take(token_id, logprobs)
            tokens.append(_Token(token_id, logprobs, texts, shown.text_offset))
            shown.text_offset += len(tokens[-1].own.text)
        if tokens and completion.finish_reason is not None and completion.text.endswith(HALF):
            last, text = tokens[-1], tokens[-1].own.text + shown.texts.rest()
            last.texts[last.token_id] = last.own._replace(name=text, text=text)
        return tokens

    def _chat_token(self, token: _Token) -> Json:
        logprobs = token.logprobs
        assert logprobs is not None, "a chat has no prompt logprobs"
        num_top = self._request.states[0].params.logprobs or 0

        def named(token_id: int, logprob: Logprob) -> Json:
            name, _, spelled = token.texts[token_id]
            return {"token": name, "logprob": _finite(logprob), "bytes": list(spelled)}

        top = [named(*each) for each in _by_rank(logprobs)[:num_top]]
        return {**named(token.token_id, logprobs[token.token_id]), "top_logprobs": top}


def _message(parts: list[AnswerPart], is_whole: bool) -> Json:
    """Return thoughts, words and calls in OpenAI's form. A call's first part has its name and id.

    Args:
        is_whole: whether to write a content also if there is none.
    """
    words = "".join(part.words for part in parts)
    calls: list[Json] = []
    for part in parts:
        if part.call is None:
            continue
        call: Json = {"index": part.call, "function": {"arguments": part.arguments}}
        if part.name is not None:
            call = {"index": part.call, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
            call["function"] = {"name": part.name, "arguments": part.arguments}
        calls.append(call)
    message: Json = {"tool_calls": calls} if calls else {}
    if thoughts := "".join(part.thoughts for part in parts):
        message["reasoning_content"] = thoughts
    if words or is_whole or any(part.name is not None for part in parts):
        message = {"content": words or (None if calls else ""), **message}
    return message


def _by_name(token: _Token) -> dict[str, float] | None:
    """Return the likeliest tokens of a completion, by their names. OpenAI and vLLM drop all but one
    of those that have one name. Here others are called `token_id:7`, so that a client sees whether
    the token was the likeliest."""
    if token.logprobs is None:
        return None
    by_name: dict[str, float] = {}
    for token_id, logprob in _by_rank(token.logprobs):
        name = token.texts[token_id].name
        is_taken = name in by_name or name == token.own.name
        if is_taken and token_id != token.token_id:
            name = f"token_id:{token_id}"
        by_name[name] = _finite(logprob)
    return by_name


def event(data: Json) -> bytes:
    """Return a server-sent event in ASCII: some clients read U+2028 as the end of a line."""
    return b"data: " + _ascii(data) + b"\n\n"


def _ascii(data: Json) -> bytes:
    return _ASCII.encode(data).encode()


def _json(data: Json) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


LAST_EVENT = b"data: [DONE]\n\n"


def _by_rank(logprobs: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda item: item[1].rank)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)
