"""Bodies of answers, as OpenAI's API has them: whole ones, and events of a stream."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from milestone_llm.core.outputs import Logprob

from .async_engine import ApiRequest
from .engine_client import CompletionDelta

Json = dict[str, Any]
MIN_LOGPROB = -9999.0
"""JSON knows no infinity."""


class ResponseBodies:
    """Writes the answer to one API request. With log-probabilities, it decodes tokens one by one.

    Args:
        is_chat: whether in the format of chats.
        prompts: what each choice's text begins with (`echo`); empty texts for none.
        decode: text of one token.
        spell: its bytes.
    """

    def __init__(
        self,
        request: ApiRequest,
        request_id: str,
        model: str,
        is_chat: bool,
        prompts: Sequence[str],
        decode: Callable[[int], str],
        spell: Callable[[int], bytes],
    ) -> None:
        self._request = request
        self._is_chat = is_chat
        self._prompts = prompts
        self._decode, self._spell = decode, spell
        kind = "chat.completion" if is_chat else "text_completion"
        created = int(time.time())
        self._head = {"id": request_id, "object": kind, "created": created, "model": model}
        self._event_head = {**self._head, "object": kind + ".chunk" * is_chat}
        self._begun: set[int] = set()
        self._text_lengths: dict[int, int] = {}
        self._num_completion_tokens = 0
        self.drops_output = False
        """Whether only the prompt was asked for (`max_tokens` 0)."""
        self.wants_usage = False
        """Whether a stream tells the numbers of tokens in its last event, and null before."""

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self._request.requests[0].params.logprobs is not None

    def whole(self, deltas: Iterable[CompletionDelta]) -> Iterator[bytes]:
        """The answer that is no stream, in pieces of one choice at most."""
        deltas = sorted(deltas, key=lambda delta: delta.index)
        self._count(deltas)
        before = _json(self._head)[:-1] + b',"choices":['
        for delta in deltas:
            yield before + _json(self._choice(delta, is_event=False))
            before = b","
        yield b'],"usage":' + _json(self._usage()) + b"}"

    def events(self, deltas: Iterable[CompletionDelta]) -> bytes:
        """The next events of a stream, one for each choice that has something to show."""
        self._count(deltas)
        usage = {"usage": None} if self.wants_usage else {}
        return b"".join(
            event({**self._event_head, "choices": [self._choice(delta, is_event=True)], **usage})
            for delta in deltas
            if delta.text or delta.logprobs or delta.finish_reason or self._is_new(delta)
        )

    def usage_event(self) -> bytes:
        """The event that tells the numbers of tokens."""
        return event({**self._event_head, "choices": [], "usage": self._usage()})

    def _count(self, deltas: Iterable[CompletionDelta]) -> None:
        if not self.drops_output:
            self._num_completion_tokens += sum(len(delta.token_ids) for delta in deltas)

    def _is_new(self, delta: CompletionDelta) -> bool:
        return delta.index not in self._begun and self._is_chat

    def _choice(self, delta: CompletionDelta, is_event: bool) -> Json:
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        logprobs = self._logprobs(delta, is_first)
        choice: Json = {"index": delta.index, "logprobs": logprobs}
        choice["finish_reason"] = delta.finish_reason
        if not self._is_chat:
            text = "" if self.drops_output else delta.text
            return {**choice, "text": self._prompts[delta.index] * is_first + text}
        message: Json = {"content": delta.text}
        if is_first:
            message = {"role": "assistant", **message}
        return {**choice, "delta" if is_event else "message": message}

    def _usage(self) -> Json:
        requests = self._request.requests
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._request.num_cached_tokens)},
        }

    # -- log-probabilities -------------------------------------------------------------------

    def _logprobs(self, delta: CompletionDelta, is_first: bool) -> Json | None:
        tokens: list[tuple[int, dict[int, Logprob] | None]] = []
        index = delta.index * len(self._request.requests) // self._request.num_choices
        request = self._request.requests[index]
        prompt_logprobs = self._request.prompt_logprobs[index]
        if is_first and prompt_logprobs is not None:
            tokens += zip(request.prompt_token_ids, prompt_logprobs, strict=True)
        if not self.drops_output:
            tokens += zip(delta.token_ids, delta.logprobs, strict=False)  # none if not asked for
        if not self.has_logprobs:
            return None
        if self._is_chat:
            return {"content": [self._chat_token(*token) for token in tokens]}
        return self._text_tokens(delta.index, tokens)

    def _text_tokens(
        self, index: int, tokens: Sequence[tuple[int, dict[int, Logprob] | None]]
    ) -> Json:
        offset, offsets = self._text_lengths.get(index, 0), []
        names = [self._decode(token_id) for token_id, _ in tokens]
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._text_lengths[index] = offset
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
        num_top = self._request.requests[0].params.logprobs or 0
        top = [self._named(each, logprobs) for each, _ in _by_rank(logprobs)[:num_top]]
        return {**self._named(token_id, logprobs), "top_logprobs": top}

    def _named(self, token_id: int, logprobs: dict[int, Logprob]) -> Json:
        logprob, spelled = _finite(logprobs[token_id]), list(self._spell(token_id))
        return {"token": self._decode(token_id), "logprob": logprob, "bytes": spelled}


def event(data: Json) -> bytes:
    """A server-sent event, in ASCII: to some clients, U+2028 is the end of a line."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _json(data: Json) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


LAST_EVENT = b"data: [DONE]\n\n"


def token_decoder(tokenizer: Any) -> Callable[[int], str]:
    """Text of one token; `token_id:7` for a model without a tokenizer, as vLLM writes it."""

    @functools.lru_cache(maxsize=65536)
    def decode(token_id: int) -> str:
        if tokenizer is None:
            return f"token_id:{token_id}"
        text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text

    return decode


def token_speller(tokenizer: Any) -> Callable[[int], bytes]:
    """Bytes of one token. Tokens of a part of a letter have no text, but bytes that make it up."""
    decode = token_decoder(tokenizer)
    byte_of = _bytes_of_letters()

    @functools.lru_cache(maxsize=65536)
    def spell(token_id: int) -> bytes:
        text = decode(token_id)
        if tokenizer is None or "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        token: str = tokenizer.convert_ids_to_tokens(token_id)
        if fallback := re.fullmatch("<0x([0-9A-F]{2})>", token):  # of SentencePiece
            return bytes.fromhex(fallback[1])
        if byte_of.keys() >= set(token):  # of byte-level BPE, a letter for each byte
            return bytes(byte_of[letter] for letter in token)
        return text.encode()

    return spell


def _bytes_of_letters() -> dict[str, int]:
    """How GPT-2 and its followers write bytes: a visible one as itself, others from U+0100 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = [*map(chr, visible), *(chr(256 + index) for index in range(len(others)))]
    return dict(zip(letters, visible + others, strict=True))


def _by_rank(logprobs: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda item: item[1].rank)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)
