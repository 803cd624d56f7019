"""`allowed_token_ids` and `bad_words`: which tokens may come next, by lists of token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from milestone_llm.core.allowed_tokens import AllowedTokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


def spellings(tokenizer: Any, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token ids of texts, inside of a word and at the beginning of one.

    A space before a text changes its tokens. The second spelling counts only if it has another
    first token and no more tokens than the first one, as in vLLM: the others begin with a space
    that is a token of its own, and end like the first.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        inside, first = (
            tuple(tokenizer(space + word.lstrip(), add_special_tokens=False)["input_ids"])
            for space in ("", " ")
        )
        found.append(inside)
        if first[:1] != inside[:1] and len(first) == len(inside):
            found.append(first)
    return [each for each in found if each]


class TokenLists(AllowedTokens):
    """The rule of a request with lists of tokens, and maybe with a grammar besides.

    Args:
        allowed: the only tokens that may come; None: all.
        banned: sequences of tokens that never come; the last token of each is banned where the
            output ends with the others.
        grammar: allows fewer tokens still.
    """

    def __init__(
        self,
        vocab_size: int,
        allowed: Collection[int] | None,
        banned: Sequence[tuple[int, ...]],
        grammar: AllowedTokens | None,
    ) -> None:
        self.vocab_size = vocab_size
        self.allowed = None if allowed is None else frozenset(allowed)
        self.banned = banned
        self.grammar = grammar
        self._words: NDArray[np.uint32] | None = None
        """The last bitmask."""

    @property
    def num_allowed(self) -> int:
        """Number of tokens that the last bitmask allows."""
        if self._words is None:
            return self.vocab_size
        return sum(int(word).bit_count() for word in self._words)

    @property
    def problem(self) -> str | None:
        """Why the last bitmask allows nothing; None: it allows something."""
        if self.num_allowed:
            return None
        of_grammar = self.grammar.problem if self.grammar is not None else None
        given = {"allowed_token_ids": self.allowed is not None, "bad_words": bool(self.banned)}
        names = " and ".join(name for name, is_given in given.items() if is_given)
        return of_grammar or f"{names}: no token is left to choose"

    def bits(self, output_token_ids: Sequence[int], num_known: int | None = None) -> Tensor:
        """Return the bitmask of allowed tokens, int32 `[ceil(vocab_size / 32)]`."""
        import numpy as np
        import torch

        ids = range(self.vocab_size) if self.allowed is None else sorted(self.allowed)
        is_allowed = np.zeros((self.vocab_size + 31) // 32 * 32, bool)
        is_allowed[np.fromiter(ids, np.int64, len(ids))] = True
        is_allowed[list(self._banned_after(output_token_ids))] = False
        self._words = np.packbits(is_allowed, bitorder="little").view("<u4")
        if self.grammar is not None:
            self._words &= self.grammar.bits(output_token_ids, num_known).numpy().view(np.uint32)
        return torch.from_numpy(self._words.view(np.int32))

    def continuation(
        self, output_token_ids: Sequence[int], token_ids: list[int], most: int
    ) -> list[int]:
        """Return tokens that may follow: the grammar's, or `token_ids`, up to the first that the
        lists do not allow."""
        if self.grammar is not None:
            token_ids = self.grammar.continuation(output_token_ids, token_ids, most)
        output = list(output_token_ids)
        for place, token_id in enumerate(token_ids):
            is_allowed = self.allowed is None or token_id in self.allowed
            if not is_allowed or token_id in self._banned_after(output):
                return token_ids[:place]
            output.append(token_id)
        return token_ids

    def _banned_after(self, output_token_ids: Sequence[int]) -> set[int]:
        num_tokens = len(output_token_ids)
        return {
            last
            for *others, last in self.banned
            if len(others) <= num_tokens
            and list(output_token_ids[num_tokens - len(others) :]) == others
        }
