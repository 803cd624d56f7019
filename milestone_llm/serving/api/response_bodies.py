"""Bodies of answers in the format of OpenAI's API: whole answers, and events of a stream."""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from milestone_llm.core.outputs import Logprob
from milestone_llm.frontend.detokenizer import known_tokens
from milestone_llm.frontend.outputs import CompletionOutput, RequestOutput

from .async_engine import ApiRequest
from .protocol import ChatRequest, Sampling
from .structured import is_json, read_call

Json = dict[str, Any]
MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""
_ASCII = json.JSONEncoder(separators=(",", ":"))


@dataclass(slots=True)
class _Shown:
    """How much of a choice has been sent to the client."""

    num_characters: int = 0
    num_tokens: int = 0
    text_offset: int = 0
    """Characters of the tokens whose log-probabilities have been sent."""
    is_new: bool = True
    """Whether nothing has been sent yet."""
    is_ended: bool = False
    has_name: bool = False
    """Whether the name of the called function has been sent."""


class ResponseBodies:
    """Writes the answer to one API request. For log-probabilities, it decodes tokens one by one.

    Args:
        body: the client's request.
        prompts: text before each choice's own (`echo`); empty texts without `echo`.
        decode: returns the text of one token.
        spell: returns the bytes of one token.
    """

    def __init__(
        self,
        request: ApiRequest,
        request_id: str,
        model: str,
        body: Sampling,
        prompts: Sequence[str],
        decode: Callable[[int], str],
        spell: Callable[[int], bytes],
    ) -> None:
        self.wants_usage = body.wants_usage_event
        """Whether the last event of a stream has the numbers of tokens, and earlier ones null."""
        self._request = request
        self._is_chat = isinstance(body, ChatRequest)
        self._calls_tool = isinstance(body, ChatRequest) and body.calls_tool
        self._drops_output = not self._is_chat and body.max_tokens == 0  # only the prompt is wanted
        self._prompts = prompts
        self._decode, self._spell = decode, spell
        kind = "chat.completion" if self._is_chat else "text_completion"
        created = int(time.time())
        self._head = {"id": request_id, "object": kind, "created": created, "model": model}
        self._event_head = {**self._head, "object": kind + ".chunk" * self._is_chat}
        self._event_start = b"data: " + _ascii(self._event_head)[:-1] + b',"choices":['
        self._places = {state.request_id: at for at, state in enumerate(request.states)}
        self._shown = [_Shown() for _ in range(request.num_choices)]
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
        end = b'],"usage":null}\n\n' if self.wants_usage else b"]}\n\n"
        choices = self._choices(outputs, is_event=True)
        return b"".join(self._event_start + _ascii(choice) + end for choice in choices)

    def usage_event(self) -> bytes:
        """Return the event with the numbers of tokens."""
        return event({**self._event_head, "choices": [], "usage": self._usage()})

    def _choices(self, outputs: Sequence[RequestOutput], is_event: bool) -> Iterator[Json]:
        """Yield what is new in each choice, and count it as sent."""
        n = self._request.num_choices // len(self._places)
        for output in outputs:
            place = self._places[output.request_id]
            for completion in output.outputs:
                index = place * n + completion.index
                shown = self._shown[index]
                if shown.is_ended or completion.finish_reason == "error":
                    continue
                text, name, finish_reason = completion.text, None, completion.finish_reason
                if self._calls_tool:
                    name, text = read_call(text, finish_reason is not None)
                    if finish_reason == "stop" and name and is_json(text):  # no stop string cut it
                        finish_reason = "tool_calls"
                new_name = None if shown.has_name else name
                shown.has_name = name is not None
                text = text[shown.num_characters :]
                shown.num_characters += len(text)
                if not self._drops_output:
                    self._num_completion_tokens += completion.num_tokens - shown.num_tokens
                is_role = self._is_chat and shown.is_new and not self._calls_tool
                is_news = text or finish_reason or new_name or is_role
                if is_news or (completion.logprobs and completion.num_tokens > shown.num_tokens):
                    choice = self._choice(index, text, new_name, output, completion, is_event)
                    yield {**choice, "finish_reason": finish_reason}
                    shown.is_new, shown.is_ended = False, finish_reason is not None
                shown.num_tokens = completion.num_tokens

    def _choice(
        self,
        index: int,
        text: str,
        new_name: str | None,
        output: RequestOutput,
        completion: CompletionOutput,
        is_event: bool,
    ) -> Json:
        shown = self._shown[index]
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self._logprobs(shown, output, completion)
        choice: Json = {"index": index, "logprobs": logprobs}
        if not self._is_chat:
            text = "" if self._drops_output else text
            return {**choice, "text": self._prompts[index] * shown.is_new + text}
        message = self._call(text, new_name) if self._calls_tool else {"content": text}
        if shown.is_new:
            message = {"role": "assistant", **message}
        return {**choice, "delta" if is_event else "message": message}

    def _call(self, arguments: str, new_name: str | None) -> Json:
        """Return the new part of a function call. The first part has its name and id."""
        if new_name is not None:
            function = {"name": new_name, "arguments": arguments}
            call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
            return {"content": None, "tool_calls": [{"index": 0, **call}]}
        if arguments:
            return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
        return {}

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

    def _logprobs(self, shown: _Shown, output: RequestOutput, completion: CompletionOutput) -> Json:
        tokens: list[tuple[int, dict[int, Logprob] | None]] = []
        if shown.is_new and output.prompt_logprobs is not None:
            tokens += zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if not self._drops_output:
            new = slice(shown.num_tokens, None)
            logprobs = completion.logprobs or []
            tokens += zip(completion.token_ids[new], logprobs[new], strict=True)
        if self._is_chat:
            return {"content": [self._chat_token(*token) for token in tokens]}
        return self._text_tokens(shown, tokens)

    def _text_tokens(
        self, shown: _Shown, tokens: Sequence[tuple[int, dict[int, Logprob] | None]]
    ) -> Json:
        offsets = []
        names = [self._decode(token_id) for token_id, _ in tokens]
        for name in names:
            offsets.append(shown.text_offset)
            shown.text_offset += len(name)
        top: list[dict[str, float] | None] = []
        for _, logprobs in tokens:
            if logprobs is None:  # nothing comes before the first token of a prompt
                top.append(None)
                continue
            by_name: dict[str, float] = {}
            for token_id, each in _by_rank(logprobs):  # different tokens may have one text
                by_name.setdefault(self._decode(token_id), _finite(each))
            top.append(by_name)
        return {
            "tokens": names,
            "token_logprobs": [each and _finite(each[token_id]) for token_id, each in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _chat_token(self, token_id: int, logprobs: dict[int, Logprob] | None) -> Json:
        assert logprobs is not None, "a chat has no prompt logprobs"
        num_top = self._request.states[0].params.logprobs or 0
        top = [self._named(each, logprobs) for each, _ in _by_rank(logprobs)[:num_top]]
        return {**self._named(token_id, logprobs), "top_logprobs": top}

    def _named(self, token_id: int, logprobs: dict[int, Logprob]) -> Json:
        logprob, spelled = _finite(logprobs[token_id]), list(self._spell(token_id))
        return {"token": self._decode(token_id), "logprob": logprob, "bytes": spelled}


def event(data: Json) -> bytes:
    """Return a server-sent event in ASCII: some clients read U+2028 as the end of a line."""
    return b"data: " + _ascii(data) + b"\n\n"


def _ascii(data: Json) -> bytes:
    return _ASCII.encode(data).encode()


def _json(data: Json) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


LAST_EVENT = b"data: [DONE]\n\n"


def token_decoder(tokenizer: Any) -> Callable[[int], str]:
    """Return a function: text of one token. Without a tokenizer it is `token_id:7`, as in vLLM."""

    @functools.lru_cache(maxsize=65536)
    def decode(token_id: int) -> str:
        if tokenizer is None:
            return f"token_id:{token_id}"
        known = known_tokens(tokenizer, [token_id])
        text: str = tokenizer.decode(known, clean_up_tokenization_spaces=False)
        return text

    return decode


def token_speller(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function: bytes of one token. A token may be part of a character: it has bytes, no
    text."""
    decode = token_decoder(tokenizer)
    byte_of = _bytes_of_letters()

    @functools.lru_cache(maxsize=65536)
    def spell(token_id: int) -> bytes:
        text = decode(token_id)
        if tokenizer is None or "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        token: str = tokenizer.convert_ids_to_tokens(token_id)
        if fallback := re.fullmatch("<0x([0-9A-F]{2})>", token):  # a byte token of SentencePiece
            return bytes.fromhex(fallback[1])
        if byte_of.keys() >= set(token):  # a token of byte-level BPE: one letter for each byte
            return bytes(byte_of[letter] for letter in token)
        return text.encode()

    return spell


def _bytes_of_letters() -> dict[str, int]:
    """Map letters to bytes as GPT-2 does: visible bytes are themselves, others U+0100 and
    following."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = [*map(chr, visible), *(chr(256 + index) for index in range(len(others)))]
    return dict(zip(letters, visible + others, strict=True))


def _by_rank(logprobs: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda item: item[1].rank)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)
