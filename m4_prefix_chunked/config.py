"""M4's additions to the configuration: switches, and how prefill shares a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeVar

import m3_paged.config
from milestone_llm.core.errors import InputError

Config = TypeVar("Config", bound="EngineConfig")

IDLE_TOKENS = {"cpu": 16, "cuda": 256}
"""Most tokens of a step, draft tokens included, at which draft tokens paid: see
`rows_that_guess`."""


def rows_that_guess(device_type: str, num_guesses: int) -> int:
    """Return the most rows of 1 + num_guesses tokens each in a step that has arithmetic to spare.

    Each weight is read once a step, and used for a multiplication and an addition once a token:

        reading     bytes of a weight / bytes a second
        arithmetic  2 x tokens / operations a second

    Reading and arithmetic take equally long at this many tokens, for a model of any shape:
    bytes of a weight / 2 x operations a second / bytes a second. An H200 does 688 T operations in
    bf16 and reads 4.4 TB a second: 156 tokens. A core of a server's CPU did 55 G operations in fp32
    and read 7.4 GB: 15 tokens.

    On a GPU more tokens are taken. Steps read contexts, too, and read them once for all draft
    tokens of a request: with 2,500 tokens of context, 64 rows of four made 2.1 times as many tokens
    on text that repeats.
    """
    return max(1, IDLE_TOKENS.get(device_type, 16) // (1 + num_guesses))


@dataclass(frozen=True)
class EngineConfig(m3_paged.config.EngineConfig):
    """Limits and switches of an engine with prefix caching and chunked prefill."""

    enable_prefix_caching: bool = True
    """Keep the KV of full blocks after their request ended, and find it again by content."""
    enable_chunked_prefill: bool = True
    """Compute a prompt in as many steps as the token budget asks for."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in a step; 0: as many as the budget has left."""
    prefill_policy: str = "mixed"
    """"mixed": decode rows first, prefill rows take the rest of the budget. "prefill_first":
    a step with prefill rows has no others, so that arrivals stall every decode."""

    disable_hybrid_kv_cache_manager: bool = False
    """Keep every block of every layer. False: layers with a window give back what they see no more,
    unless `scheduler` is of one's own and no subclass of M4's."""

    speculation: str | None = None
    """"ngram": decode rows also compute draft tokens, made from the request's own tokens (see
    `ngram`). None: one token a row and step. The tokens that come out are the same."""
    num_speculative_tokens: int = 3
    """Most draft tokens of a row, 16 or fewer."""
    speculation_max_num_seqs: int | None = None
    """Most rows of a step with draft tokens: in steps of more rows, arithmetic is not idle while
    weights are read. None: as many as pay on the model's device, see `rows_that_guess`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculation not in (None, "ngram"):
            raise InputError(f'speculation must be "ngram" or None, got {self.speculation!r}')
        if not 1 <= self.num_speculative_tokens <= 16:
            raise InputError(
                f"num_speculative_tokens must be from 1 to 16, got {self.num_speculative_tokens}"
            )
        if self.speculation_max_num_seqs is not None and self.speculation_max_num_seqs < 1:
            raise InputError(
                f"speculation_max_num_seqs must be at least 1, got {self.speculation_max_num_seqs}"
            )
        if self.prefill_policy not in ("mixed", "prefill_first"):
            raise InputError(
                f'prefill_policy must be "mixed" or "prefill_first", got {self.prefill_policy!r}'
            )
        if self.long_prefill_token_threshold < 0:
            raise InputError(
                "long_prefill_token_threshold must be at least 0, "
                f"got {self.long_prefill_token_threshold}"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise InputError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts "
                "into chunks, but enable_chunked_prefill is False"
            )

    @property
    def has_chunked_prefill(self) -> bool:
        """Whether a prompt may be computed in several steps."""
        return self.enable_chunked_prefill

    @property
    def num_rows_that_guess(self) -> int:
        """Most rows of a step with draft tokens."""
        return min(self.max_num_seqs, self.speculation_max_num_seqs or self.max_num_seqs)

    def on_device(self: Config, device_type: str, given: Collection[str]) -> Config:
        """Fill in `max_num_seqs`, as M3 does, and `speculation_max_num_seqs` for this device,
        unless given: as many rows as pay there."""
        config = super().on_device(device_type, given)
        if config.speculation_max_num_seqs is None:
            most = rows_that_guess(device_type, config.num_speculative_tokens)
            config = replace(config, speculation_max_num_seqs=most)
        return config
