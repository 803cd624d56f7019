"""What M4 adds to the configuration: switches, and how prefill shares a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from m2_batching.config import check_order, check_step_budget
from m3_paged.config import (
    GPU_MAX_NUM_SEQS,
    check_blocks_hold,
    check_kv_fields,
    check_recompute_fits_a_step,
    num_host_blocks,
)
from milestone_llm.core.errors import InputError
from milestone_llm.frontend import config as base

IDLE_TOKENS = {"cpu": 16, "cuda": 256}
"""Tokens of a step, guesses among them, up to which guesses paid: see `rows_that_guess`."""


def rows_that_guess(device_type: str, num_guesses: int) -> int:
    """Most rows of 1 + num_guesses tokens each in a step that has arithmetic to spare.

    Each weight is read once a step, and used for a multiplication and an addition once a token:

        reading     bytes of a weight / bytes a second
        arithmetic  2 x tokens / operations a second

    They take equally long at bytes / 2 x operations a second / bytes a second tokens, whatever the
    shape of the model. An H200 does 688 T operations in bf16 and reads 4.4 TB a second: 156 tokens.
    A core of a server's CPU did 55 G operations in fp32 and read 7.4 GB: 15 tokens. On a GPU more
    are taken, since steps read contexts, too, and those once for all guesses of a request: with
    2,500 tokens of context, 64 rows of four made 2.1 times as many tokens on text that repeats.
    """
    return max(1, IDLE_TOKENS.get(device_type, 16) // (1 + num_guesses))


@dataclass(frozen=True)
class EngineConfig(base.EngineConfig):
    """Limits and switches of an engine with prefix caching and chunked prefill."""

    # Of m2_batching.
    policy: str = "fcfs"
    aging_seconds: float | None = None

    # Of m3_paged.
    block_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    preemption: str = "recompute"
    swap_space_tokens: int | None = None

    enable_prefix_caching: bool = True
    """Keep the KV of full blocks after their request ended, and find it again by content."""
    enable_chunked_prefill: bool = True
    """Compute a prompt in as many steps as the token budget asks for."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in a step; 0: as many as the budget has left."""
    prefill_policy: str = "mixed"
    """"mixed": decode rows first, prefill rows take the rest of the budget. "prefill_first":
    a step with prefill rows has no others, so that arrivals stall every decode."""

    speculation: str | None = None
    """"ngram": decode rows compute guesses beside their token, made from the request's own tokens
    (see `ngram`). None: one token a row and step. The tokens that come out are the same."""
    num_speculative_tokens: int = 3
    """Most guesses of a row, 16 or fewer."""
    speculation_max_num_seqs: int | None = None
    """No guesses in steps of more rows: where weights are read for many, arithmetic is not idle.
    None: as many as pay on the model's device, see `rows_that_guess`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self.policy, self.aging_seconds)
        if not self.enable_chunked_prefill:  # in chunks, a row that does not fit waits a step
            check_step_budget(self.max_num_batched_tokens, self.max_num_seqs)
        check_kv_fields(self)
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
    def num_rows_that_guess(self) -> int:
        """Most rows of a step with guesses."""
        return min(self.max_num_seqs, self.speculation_max_num_seqs or self.max_num_seqs)

    def on_device(self, device_type: str, given: Collection[str]) -> EngineConfig:
        """With as many rows, and rows that guess, as pay there, unless somebody has chosen.

        Args:
            device_type: of the model, "cpu" or "cuda".
            given: names of the fields that were chosen.
        """
        config = self
        if device_type == "cuda" and "max_num_seqs" not in given:
            config = replace(config, max_num_seqs=GPU_MAX_NUM_SEQS)
        if config.speculation_max_num_seqs is None:
            most = rows_that_guess(device_type, config.num_speculative_tokens)
            config = replace(config, speculation_max_num_seqs=most)
        return config

    def resolve_max_model_len(self, model_max_len: int | None) -> int:
        """The `max_model_len` in force: with chunked prefill, whatever the step's budget."""
        if not self.enable_chunked_prefill or self.max_model_len or not model_max_len:
            return super().resolve_max_model_len(model_max_len)
        return model_max_len

    def check_holds_one_request(self, max_model_len: int, num_blocks: int) -> None:
        """A lone request must be able to grow to `max_model_len` and to be recomputed there.

        Raises:
            InputError: too few blocks; or, without chunks, a step too small for one recomputation.
        """
        check_blocks_hold(max_model_len, num_blocks, self.block_size)
        if not self.enable_chunked_prefill:
            check_recompute_fits_a_step(max_model_len, self.max_num_batched_tokens)

    def num_host_blocks(self, num_blocks: int) -> int:
        """Blocks of host memory for swapping, given the blocks on the device."""
        return num_host_blocks(self, num_blocks)
