"""The tensor-parallel group of one process, which computes the model alone.

With several GPUs there is a process for each, and another object takes the place of this one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.engine_driver import Peers

from .decoder.shard import Shard

if TYPE_CHECKING:
    from milestone_llm.structured.grammars import Grammars


class Group:
    """A group of one process, which has no others to agree with."""

    rank, size = 0, 1
    device: torch.device | None = None
    """The device of this process, if it is decided already."""
    shard = Shard()

    def part_of(self, whole: PreTrainedModel) -> PreTrainedModel:
        """Return the config and modules of what is computed here. KV memory is sized by them."""
        return whole

    def smallest(self, number: int) -> int:
        """Return the smallest of all processes' numbers. All of them can have that many."""
        return number

    def oom_suppressed(self) -> contextlib.AbstractContextManager[None]:
        """Ignore that memory does not hold a step, which is then not computed."""
        return contextlib.suppress(torch.OutOfMemoryError)

    def compile(self, params: SamplingParams) -> None:
        """Tell the other processes of a grammar that is about to be compiled."""

    def peers(self, grammars: Grammars) -> Peers:
        """Return the same engine in the other processes, for the driver of this one."""
        return Peers()

    def register(self, engine: Any) -> None:
        """Note an engine that has been built."""
