"""Texts and bytes of single tokens, as log-probabilities name them.

A token has no text of its own: SentencePiece drops the space before the first word of a text, and a
character may be spread over several tokens. So a token is named by what it adds to the text that it
is in. Then the names together are the text, and so are the bytes.

    tokens    ▁The   ▁sea   <0xE2> <0x82> <0xAC>   </s>
    name      The     sea                  €       </s>     (the text does not show </s>)
    bytes     The     sea    E2     82     AC
    offset    0      3      7      7      7        8
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from milestone_llm.frontend.detokenizer import Detokenizer, known_tokens

HALF = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are no character."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class TokenText(NamedTuple):
    """What a token is called at one place of a text."""

    name: str
    """What it adds to the text. Or its own name, if that is a special token, which adds nothing."""
    text: str
    """What it adds to the text. Nothing, if it begins a character that the next one completes."""
    spelled: bytes
    """Bytes that it adds to the text, also if they are part of a character."""


class Vocabulary:
    """What a tokenizer's tokens are outside of any text. Use it in one thread.

    Args:
        tokenizer: a Hugging Face tokenizer; None: tokens are called `token_id:7`, as in vLLM.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._byte_of = _bytes_of_letters()
        self._facts_of = functools.lru_cache(maxsize=65536)(self._look_at)

    def text_of(self, token_id: int, added: str) -> TokenText:
        """Return what a token is called where it adds `added` to a text."""
        if self.tokenizer is None:
            return TokenText(f"token_id:{token_id}", "", b"")
        special, own_bytes = self._facts_of(token_id)
        if special and not added:
            return TokenText(special, "", b"")
        # Half a character before it, which nothing will complete, is added with it.
        spelled = added.lstrip(HALF).encode() if own_bytes is None else own_bytes
        return TokenText(added, added, spelled)

    def _look_at(self, token_id: int) -> tuple[str, bytes | None]:
        """Return a token's name, if it is special, and its bytes, if they may be part of a
        character."""
        if not (known := known_tokens(self.tokenizer, [token_id])):
            return "", b""
        decode = functools.partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        alone: str = decode(known, skip_special_tokens=True)
        special: str = "" if alone else decode(known, skip_special_tokens=False)
        if HALF not in alone:
            return special, None
        token: str = self.tokenizer.convert_ids_to_tokens(token_id)
        if fallback := _BYTE_TOKEN.fullmatch(token):  # a byte token of SentencePiece
            return special, bytes.fromhex(fallback[1])
        if self._byte_of.keys() >= set(token):  # byte-level BPE: one letter for each byte
            return special, bytes(self._byte_of[letter] for letter in token)
        return special, alone.encode()


class TokenTexts:
    """Names the tokens of one text, from its beginning.

    Args:
        skip_special_tokens: Whether the text leaves special tokens out.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        tokenizer = vocabulary.tokenizer
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, (), skip_special_tokens)

    def take(self, token_id: int, others: Iterable[int]) -> dict[int, TokenText]:
        """Take the next token. Return what it and others are called that could have come
        instead."""
        at_this_place = {each: self._text_of(each) for each in {token_id, *others}}
        if self._detokenizer is not None:
            self._detokenizer.take(token_id)
        return at_this_place

    def rest(self) -> str:
        """Return what the text ends with if no more tokens come: half a character."""
        return "" if self._detokenizer is None else self._detokenizer.rest()

    def _text_of(self, token_id: int) -> TokenText:
        added = "" if self._detokenizer is None else self._detokenizer.added_by(token_id)
        return self._vocabulary.text_of(token_id, added)


def _bytes_of_letters() -> dict[str, int]:
    """Map letters to bytes as GPT-2 does: visible bytes are themselves, others U+0100 and
    following."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = [*map(chr, visible), *(chr(256 + index) for index in range(len(others)))]
    return dict(zip(letters, visible + others, strict=True))
