"""What else limits a request's next token, beside its parameters: a grammar, for instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class AllowedTokens(Protocol):
    """A rule of one request. It goes by the output so far and by nothing else: a request that was
    preempted or restarted has its tokens, and so needs nothing more."""

    @property
    def num_allowed(self) -> int:
        """How many tokens the bits that were asked for last allow."""

    def bits(self, output_token_ids: Sequence[int]) -> Any:
        """The tokens that may follow this output: a tensor, int32 `[ceil(vocab_size / 32)]` on the
        CPU, in which token t has bit t % 32 of word t // 32."""

    def continuation(
        self, output_token_ids: Sequence[int], token_ids: list[int], most: int
    ) -> list[int]:
        """What may follow, one after the other: these tokens up to the first that is not allowed;
        or at most `most` others, where the rule leaves no choice."""
