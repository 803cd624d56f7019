"""A device that falls behind, as a GPU does when it has much work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from m5_kernels.device_state import DeviceState
from m5_kernels.device_step import DeviceStep
from m5_kernels.sampler import Sampler, SamplingFeatures
from m5_kernels.step_graphs import StepShape
from m5_kernels.to_host import HostTokens, fetch
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request

MANY_TOKENS = 16


class SlowState(DeviceState):
    """Device state whose changes are copied from host memory when the device comes to the copy."""

    def reset(self) -> None:
        """Empty the device's queue."""
        super().reset()
        self.queue: deque[Callable[[], None]] = deque()

    def flush(self) -> None:
        """Queue a copy of all changes."""
        if not self._places:
            return
        places = list(chain.from_iterable(self._places))
        pairs = self.in_host_memory(torch.tensor([places, list(chain.from_iterable(self._values))]))
        self._places, self._values = [], []

        def copy() -> None:
            self._arena[pairs[0]] = pairs[1].int()

        self.queue.append(copy)

    def in_host_memory(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the changes in memory that a copy can start from: places and values.

        They are `[2, num_changes]`, in new memory. On a GPU it would be pinned, which is slow.
        """
        return pairs.clone()


class SlowStep(DeviceStep):
    """Steps of many tokens are computed when the host waits for them, others at once."""

    state: SlowState

    def compute(self, shape: StepShape, features: SamplingFeatures) -> Any:
        """Queue the step. Returns a list that will get its tokens."""
        tokens: list[torch.Tensor] = []
        compute = super().compute
        self.state.queue.append(lambda: tokens.append(compute(shape, features)))
        while self.state.queue and shape.num_tokens <= MANY_TOKENS:
            self.state.queue.popleft()()
        return tokens


def slow_fetch(
    requests: Sequence[Request | None], tokens: Any, sampler: Sampler, host_tokens: HostTokens
) -> Callable[[], list[SampledToken]]:
    """Return M5's `fetch`, for a device that has not computed the tokens yet."""
    queue = sampler.state.queue  # type: ignore[attr-defined]

    def read() -> list[SampledToken]:
        while not tokens:
            queue.popleft()()
        return fetch(requests, tokens[0], sampler, host_tokens)()

    return read
