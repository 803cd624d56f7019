"""Draft tokens from a request's own tokens: after the same words, the same tokens come again.

    the cat sat on the mat . the cat | sat on the        guess: three tokens
    --- ---                  --- ---                     "the cat" was seen before

Edited code, summaries and answers that quote are full of such places. No model is asked: a draft
costs a lookup in a dictionary (prompt lookup decoding).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from milestone_llm.core.request import Request

NGRAM_LENGTHS = (3, 2)
"""Lengths of the n-gram at the end that is looked for, the longer first: it is right more often."""


class NgramProposer:
    """Guesses tokens from the place where the last n-gram was seen before. Every token is read
    once."""

    def __init__(self) -> None:
        self._indices = WeakKeyDictionary[Request, NgramIndex]()  # forgotten with their requests

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Guess `num_tokens` tokens after the known ones; none if the n-gram at their end is
        new."""
        if request.num_in_flight:  # the end is not known yet
            return []
        index = self._indices.setdefault(request, NgramIndex())
        known = request.token_ids
        index.read(known)
        for length in NGRAM_LENGTHS:
            first = index.followers.get(tuple(known[-length:]))
            if first is not None:
                guesses: list[int] = []
                for position in range(first, first + num_tokens):
                    behind = position - len(known)  # past the end, the repetition goes on
                    guesses.append(known[position] if behind < 0 else guesses[behind])
                return guesses
        return []


class NgramIndex:
    """The n-grams of a list of tokens that only grows."""

    def __init__(self) -> None:
        self.followers: dict[tuple[int, ...], int] = {}
        """Position of the token after the last occurrence of each n-gram."""
        self._num_read = 1

    def read(self, token_ids: list[int]) -> None:
        """Note the n-grams that have got a next token since the last call."""
        for position in range(self._num_read, len(token_ids)):
            for length in NGRAM_LENGTHS:
                if length <= position:
                    self.followers[tuple(token_ids[position - length : position])] = position
        self._num_read = max(1, len(token_ids))
