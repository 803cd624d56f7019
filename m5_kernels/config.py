"""What M5 adds to the configuration: two switches, to see what graphs and pipelining bring."""

from __future__ import annotations

from dataclasses import dataclass

import m4_prefix_chunked.config


@dataclass(frozen=True)
class EngineConfig(m4_prefix_chunked.config.EngineConfig):
    """Limits and switches of the engine with its own kernels."""

    enforce_eager: bool = False
    """Launch every kernel of every step: no CUDA graphs, no pipelined steps."""
    async_scheduling: bool = True
    """Plan and launch a step before the tokens of the one before have come back."""
