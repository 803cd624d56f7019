"""What M3 adds to the configuration: KV memory in blocks, and what to do when it runs out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from m2_batching.config import check_order, check_step_budget
from milestone_llm.core.errors import InputError
from milestone_llm.frontend import config as base

GPU_MAX_NUM_SEQS = 256
"""A GPU reads its weights once for all rows, and blocks are taken as they are needed."""


@dataclass(frozen=True)
class EngineConfig(base.EngineConfig):
    """Limits and switches of an engine with paged KV memory. Lengths are in tokens."""

    # Of m2_batching.
    policy: str = "fcfs"
    aging_seconds: float | None = None

    block_size: int = 16
    """Tokens in a KV block."""
    kv_cache_tokens: int | None = None
    """KV memory in tokens, rounded down to whole blocks. None: as much as regions would have taken,
    `max_num_seqs * max_model_len` (M4 and later keep up to 16 times that on CUDA, for prefixes of
    earlier requests), but no more than is free on CUDA, and on a CPU 4 GiB or one request."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be in use in all, model included, where `kv_cache_tokens`
    is None."""
    preemption: str = "recompute"
    """A preempted request's KV is dropped ("recompute") or copied to host memory ("swap")."""
    swap_space_tokens: int | None = None
    """Host memory for swapped KV, in tokens; when it is full, recompute. None: as much as
    `kv_cache_tokens`, but at most 4 GiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self.policy, self.aging_seconds)
        check_step_budget(self.max_num_batched_tokens, self.max_num_seqs)
        check_kv_fields(self)

    def on_device(self, device_type: str, given: Collection[str]) -> EngineConfig:
        """With as many rows as pay there, unless somebody has chosen.

        Args:
            device_type: of the model, "cpu" or "cuda".
            given: names of the fields that were chosen.
        """
        if device_type != "cuda" or "max_num_seqs" in given:
            return self
        return replace(self, max_num_seqs=GPU_MAX_NUM_SEQS)

    def check_holds_one_request(self, max_model_len: int, num_blocks: int) -> None:
        """A lone request must be able to grow to `max_model_len` and to be recomputed there.

        Raises:
            InputError: too few blocks, or a step too small for one recomputation.
        """
        check_blocks_hold(max_model_len, num_blocks, self.block_size)
        check_recompute_fits_a_step(max_model_len, self.max_num_batched_tokens)

    def num_host_blocks(self, num_blocks: int) -> int:
        """Blocks of host memory for swapping, given the blocks on the device."""
        return num_host_blocks(self, num_blocks)


class PagedConfig(Protocol):
    """What KV memory in blocks is made from: the configuration of M3, or of a later milestone."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def max_num_seqs(self) -> int:
        """Most requests that one step computes."""

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of one request, if that is configured."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens that one step computes."""

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""

    @property
    def kv_cache_tokens(self) -> int | None:
        """KV memory in tokens, if that is configured."""

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of a GPU's memory that may be in use."""

    @property
    def preemption(self) -> str:
        """ "recompute" or "swap"."""

    @property
    def swap_space_tokens(self) -> int | None:
        """Host memory for swapped KV, in tokens, if that is configured."""

    def checked_length(self, max_model_len: int) -> int:
        """A `max_model_len` that follows from other limits."""


def check_kv_fields(config: PagedConfig) -> None:
    """The fields that M3 brings.

    Raises:
        InputError: one is out of range.
    """
    for name, value in (
        ("block_size", config.block_size),
        ("kv_cache_tokens", config.kv_cache_tokens),
    ):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    if config.swap_space_tokens is not None and config.swap_space_tokens < 0:
        raise InputError(f"swap_space_tokens must be at least 0, got {config.swap_space_tokens}")
    if config.preemption not in ("recompute", "swap"):
        raise InputError(f'preemption must be "recompute" or "swap", got {config.preemption!r}')
    if not 0 < config.gpu_memory_utilization <= 1:
        raise InputError(
            f"gpu_memory_utilization must be in (0, 1], got {config.gpu_memory_utilization}"
        )


def check_blocks_hold(max_model_len: int, num_blocks: int, block_size: int) -> None:
    """A lone request must be able to grow to `max_model_len`.

    Raises:
        InputError: there are too few blocks.
    """
    if num_blocks * block_size < max_model_len:
        raise InputError(
            f"{num_blocks} KV blocks of {block_size} hold "
            f"{num_blocks * block_size} tokens, fewer than one request of "
            f"max_model_len={max_model_len}: raise kv_cache_tokens or lower max_model_len"
        )


def check_recompute_fits_a_step(max_model_len: int, max_num_batched_tokens: int) -> None:
    """A preempted request is recomputed whole.

    Raises:
        InputError: a step has fewer tokens than a request may have.
    """
    if max_num_batched_tokens < max_model_len:
        raise InputError(
            f"a preempted request of up to max_model_len={max_model_len} tokens is recomputed "
            f"in one step, but max_num_batched_tokens={max_num_batched_tokens}: raise it "
            "or lower max_model_len (m4_prefix_chunked computes long rows in chunks)"
        )


def num_host_blocks(config: PagedConfig, num_blocks: int) -> int:
    """Blocks of host memory for swapping, given the blocks on the device."""
    if config.preemption != "swap":
        return 0
    if config.swap_space_tokens is None:
        return num_blocks
    return config.swap_space_tokens // config.block_size
