"""M3's additions to the configuration: KV memory in blocks, and what to do when it runs out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

import m2_batching.config
from milestone_llm.core.errors import InputError

GPU_MAX_NUM_SEQS = 256
"""Default `max_num_seqs` on a GPU: it reads its weights once for all rows, and requests take blocks
only as they need them."""

Config = TypeVar("Config", bound="EngineConfig")


@dataclass(frozen=True)
class EngineConfig(m2_batching.config.EngineConfig):
    """Limits and switches of an engine with paged KV memory. Lengths are in tokens."""

    block_size: int = 16
    """Tokens in a KV block."""
    kv_cache_tokens: int | None = None
    """KV memory in tokens, rounded down to whole blocks. None: as much as regions would have taken,
    `max_num_seqs * max_model_len`. (M4 and later keep up to 16 times that on CUDA, for prefixes of
    earlier requests.) But no more than is free on CUDA, and on a CPU 4 GiB or one request."""
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
        for name, value in (
            ("block_size", self.block_size),
            ("kv_cache_tokens", self.kv_cache_tokens),
        ):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.swap_space_tokens is not None and self.swap_space_tokens < 0:
            raise InputError(f"swap_space_tokens must be at least 0, got {self.swap_space_tokens}")
        if self.preemption not in ("recompute", "swap"):
            raise InputError(f'preemption must be "recompute" or "swap", got {self.preemption!r}')
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )

    def on_device(self: Config, device_type: str, given: Collection[str]) -> Config:
        """Return the configuration for this device, with defaults that pay there.

        Without a `max_num_seqs` that the user chose, a GPU takes `GPU_MAX_NUM_SEQS`.

        Args:
            device_type: of the model, "cpu" or "cuda".
            given: names of the fields that the user chose.
        """
        if device_type != "cuda" or "max_num_seqs" in given:
            return self
        return replace(self, max_num_seqs=GPU_MAX_NUM_SEQS)

    def check_holds_one_request(self, max_model_len: int, num_blocks: int) -> None:
        """Refuse limits under which a lone request could not grow to `max_model_len`.

        Raises:
            InputError: there are too few blocks; or a preempted request does not fit into a step.
                (It is recomputed whole, unless prefill is chunked.)
        """
        if num_blocks * self.block_size < max_model_len:
            raise InputError(
                f"{num_blocks} KV blocks of {self.block_size} hold "
                f"{num_blocks * self.block_size} tokens, fewer than one request of "
                f"max_model_len={max_model_len}: raise kv_cache_tokens or lower max_model_len"
            )
        if not self.has_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise InputError(
                f"a preempted request of up to max_model_len={max_model_len} tokens is recomputed "
                f"in one step, but max_num_batched_tokens={self.max_num_batched_tokens}: raise it "
                "or lower max_model_len (m4_prefix_chunked computes long rows in chunks)"
            )

    def length_that_fits(
        self, wanted_len: int, num_blocks: int, num_blocks_for: Callable[[int], int] | None = None
    ) -> int:
        """Return `max_model_len`: where it was not configured, at most what blocks hold.

        Args:
            wanted_len: as configured, or else the model's own.
            num_blocks_for: returns how many blocks a request of so many tokens takes; None: as many
                as its tokens fill.
        """
        if self.max_model_len is not None or not num_blocks:
            return wanted_len
        num_blocks_for = num_blocks_for or self.num_blocks_for
        lengths = range(wanted_len + 1)
        return self.checked_length(bisect_right(lengths, num_blocks, key=num_blocks_for) - 1)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens fill."""
        return -(-num_tokens // self.block_size)

    def num_host_blocks(self, num_blocks: int) -> int:
        """Return the blocks of host memory for swapping, given the blocks on the device."""
        if self.preemption != "swap":
            return 0
        if self.swap_space_tokens is None:
            return num_blocks
        return self.swap_space_tokens // self.block_size
