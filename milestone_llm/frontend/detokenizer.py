"""Text of a request as it grows, token by token, and the stop strings in it.

Tokens cannot be decoded one by one: a Chinese character or an emoji may be spread over several,
and a space may depend on the token before. Decoding the whole output after each token costs O(n^2).
So a short window is decoded: the chunk of tokens last settled (context) and the tokens after it.

    tokens  [ settled ............ | context | not settled yet ]
                                   |<------- window ---------->|
    text      _settled ......................| _pending = decode(window) less decode(context)

Text that may still change is held back: an unfinished character, or text that could become a stop
string. `tokenizers.decoders.DecodeStream` has such a window but no stop strings, needs a fast
tokenizer, and raises where a byte token makes those before it invalid, which sampled tokens do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_UNSETTLED_TOKENS = 64
_PLAIN = {f"transformers.tokenization_utils_{name}" for name in ("base", "tokenizers")}
"""Modules in which the `decode` of Hugging Face's fast tokenizers is defined."""


class Detokenizer:
    """Turns output tokens into text that only ever grows, and finds stop strings in it.

    Once flushed, the text is exactly `tokenizer.decode(output_token_ids, skip_special_tokens)`
    without clean-up of spaces, cut at the stop string if there is one. (Prompt tokens play no
    part: what `decode` does to the first space, it does here too.) Appending a token decodes a few
    tokens, however long the output; only a run of byte tokens is decoded from its start.

    Args:
        tokenizer: A Hugging Face tokenizer, fast or slow.
        stop: Strings that end the text; the string that is complete first counts.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop: Whether the text keeps the stop string.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.skip_special_tokens = skip_special_tokens
        self.include_stop = include_stop
        self.found_stop: str | None = None
        """The stop string that has ended the text."""
        self._decode = _plain_decode(tokenizer, skip_special_tokens)
        self._window: list[int] = []
        self._num_context = 0  # tokens of the window that are settled
        self._context_text = ""
        self._settled = ""
        self._pending = ""  # text of the window's other tokens, as they decode now
        self._num_searched = 0  # characters in which no stop string ends (or was looked for)
        self.num_shown = 0
        """Characters that can be shown."""
        self._num_begun = self._num_taken = 0  # tokens; they differ if `append` was interrupted

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.found_stop is not None

    @property
    def text(self) -> str:
        """Text that can be shown: a prefix of the final text, and free of stop strings unless they
        are included.

        (A stop string that appeared while `look_for_stop` was False is ordinary text.)
        """
        return (self._settled + self._pending)[: self.num_shown]

    def append(self, token_id: int, look_for_stop: bool) -> bool:
        """Take the next output token.

        Args:
            look_for_stop: Whether a stop string that this token completes ends the text.

        Returns:
            Whether a stop string has appeared; `text` is then complete.
        """
        self._num_begun += 1
        is_stopped = self._append(token_id, look_for_stop)
        self._num_taken += 1
        return is_stopped

    def added_by(self, token_id: int) -> str:
        """What a token adds to the text if it comes next. A character is added by the token that
        completes it. (Stop strings are not looked for.)"""
        if _token(self.tokenizer, token_id) is None:
            return ""
        pending = self._decode([*self._window, token_id])[len(self._context_text) :]
        return self._beyond_known(pending.rstrip("\ufffd"))

    def take(self, token_id: int) -> None:
        """Append a token where `added_by` and `rest` are of interest, but not `text`. Its beginning
        is dropped, so that in a long text a token takes no longer than in a short one."""
        self.append(token_id, look_for_stop=False)
        num_dropped = min(self._num_searched, len(self._settled))
        self._settled = self._settled[num_dropped:]
        self._num_searched -= num_dropped
        self.num_shown = max(0, self.num_shown - num_dropped)

    def rest(self) -> str:
        """What no token has added yet: an unfinished character, which `flush` would show."""
        return self._beyond_known(self._pending)

    def _beyond_known(self, pending: str) -> str:
        if self._num_searched < len(self._settled):
            return self._settled[self._num_searched :] + pending
        return pending[self._num_searched - len(self._settled) :]

    def has_taken(self, num_tokens: int) -> bool:
        """Whether this many tokens have been taken, the last one whole."""
        return self._num_begun == self._num_taken == num_tokens

    def fresh_copy(self) -> Detokenizer:
        """Return a new detokenizer with the same tokenizer and stop strings."""
        return Detokenizer(self.tokenizer, self.stop, self.skip_special_tokens, self.include_stop)

    def _append(self, token_id: int, look_for_stop: bool) -> bool:
        token = _token(self.tokenizer, token_id)
        if self.is_stopped or token is None:
            return self.is_stopped
        self._window.append(token_id)
        pending = self._decode(self._window)[len(self._context_text) :]
        if pending == self._pending and self._is_special(token_id):
            self._window.pop()  # special tokens must not look like a text's start, nor pile up
            return False
        self._pending = pending
        known = self._settled + pending.rstrip("\ufffd")
        if look_for_stop and self._cut_at_stop(known):
            return True
        self._num_searched = max(self._num_searched, len(known))

        # A run of byte tokens (SentencePiece's fallback) decodes as a whole: one more byte may
        # make all of it invalid. Otherwise only a last, unfinished character can change.
        is_byte_run = _BYTE_TOKEN.fullmatch(token) is not None
        if not is_byte_run:
            if pending and not pending.endswith("\ufffd"):
                self._settle(len(self._window), pending)
            elif len(self._window) > _MAX_UNSETTLED_TOKENS:
                self._settle_part()
        certain = self._settled + ("" if is_byte_run else self._pending.rstrip("\ufffd"))
        self.num_shown = max(self.num_shown, len(certain) - self._num_held_back(certain))
        return False

    def flush(self) -> None:
        """Show all that was held back, once no more tokens will come.

        An unfinished character comes out as the tokenizer decodes it, U+FFFD.
        """
        self.num_shown = len(self._settled) + len(self._pending)

    def _is_special(self, token_id: int) -> bool:
        return not self._decode([token_id]) and bool(self.tokenizer.decode([token_id]))

    def _settle(self, end: int, text: str) -> None:
        """Settle `text`, the text of the window's tokens up to `end`: it is final."""
        self._settled += text
        self._pending = self._pending[len(text) :]
        if end == len(self._window):
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._context_text = self._decode(self._window)
        else:
            del self._window[self._num_context : end]  # the old context will do for the rest

    def _settle_part(self) -> None:
        """Settle the front of a long row of U+FFFD, which a model babbling bytes can write.

        A character has at most 4 bytes and a token at least 1. So of any 4 neighbouring places
        between tokens, at least one is not inside a character. Cut there: the two sides then decode
        to the same text as the whole.
        """
        context, skip = self._window[: self._num_context], len(self._context_text)
        for end in range(len(self._window) - 4, len(self._window) - 8, -1):
            front = self._decode(self._window[:end])[skip:]
            back = self._decode(context + self._window[end:])[skip:]
            if front + back == self._pending:
                self._settle(end, front)
                return

    def _cut_at_stop(self, known: str) -> bool:
        """End the text at the stop string that was complete first, if there is a new one."""
        found = []
        for stop in self.stop:
            start = known.find(stop, max(0, self._num_searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            end, start, self.found_stop = min(found)
            self._settled, self._pending = known[: end if self.include_stop else start], ""
            self.num_shown = len(self._settled)
        return self.is_stopped

    def _num_held_back(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop string."""
        held_back = 0
        for stop in () if self.include_stop else self.stop:
            end = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
            start = end.find(stop[0])  # a stop string can begin only there: few places to look at
            while start >= 0 and not stop.startswith(end[start:]):
                start = end.find(stop[0], start + 1)
            if start >= 0:
                held_back = max(held_back, len(end) - start)
        return held_back


def decode_whole(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    """Return the text of a complete list of tokens: the text that a flushed `Detokenizer` has."""
    return _plain_decode(tokenizer, skip_special_tokens)(known_tokens(tokenizer, token_ids))


def known_tokens(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Return the tokens that a tokenizer can decode: models may have more ids than their
    tokenizer."""
    return [token_id for token_id in token_ids if _token(tokenizer, token_id) is not None]


def _token(tokenizer: Any, token_id: int) -> str | None:
    """Return a token as the vocabulary spells it; None for an id that is not in the vocabulary."""
    try:
        return cast("str | None", tokenizer.convert_ids_to_tokens(token_id))
    except Exception:  # SentencePiece's own tokenizers raise, others give None
        return None


def _plain_decode(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return a tokenizer's `decode` of a list, without clean-up of spaces.

    A fast tokenizer is decoded by its backend: for one token, the tokenizer's `decode` takes five
    times as long, to look at its arguments. A tokenizer with a `decode` of its own keeps it.
    """
    others = [each for each in type(tokenizer).__mro__ if each.__module__ not in _PLAIN]
    has_own = any({"decode", "_decode"} & vars(each).keys() for each in others)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or has_own:
        decode = tokenizer.decode
        return partial(
            decode,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    return partial(backend.decode, skip_special_tokens=skip_special_tokens)
