"""Limits on a request's next token besides its sampling parameters: a grammar, for instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class AllowedTokens(Protocol):
    """The rule of one request. The rule depends on the output so far and on nothing else: a request
    that was preempted or restarted still has its tokens, and so needs nothing more."""

    @property
    def num_allowed(self) -> int:
        """Number of tokens that the last result of `bits` allows."""

    @property
    def problem(self) -> str | None:
        """Why the last result of `bits` allows nothing; None: it allows something."""

    def bits(self, output_token_ids: Sequence[int], num_known: int | None = None) -> Any:
        """Return the tokens that may follow this output: a tensor, int32 `[ceil(vocab_size / 32)]`
        on the CPU, in which token t has bit t % 32 of word t // 32.

        Args:
            num_known: how many of the first tokens are known; None: all. Only the tokens after
                them may break the rule. Then all may follow: nothing after a wrong token is kept.
        """

    def continuation(
        self, output_token_ids: Sequence[int], token_ids: list[int], most: int
    ) -> list[int]:
        """Return tokens that may follow, one after the other: `token_ids` up to the first that is
        not allowed; or at most `most` others, where the rule leaves no choice."""
