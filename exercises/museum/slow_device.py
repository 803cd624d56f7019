"""A device that falls behind, as a GPU does when there is much to do."""

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
    """Changes are sent from host memory when the device comes to it."""

    def reset(self) -> None:
        """There is nothing to do for the device."""
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
        """Changes where a copy can start from: places and values `[2, num_changes]`.

        Fresh memory. On a GPU it would be pinned, which takes its time.
        """
        return pairs.clone()


class SlowStep(DeviceStep):
    """Steps of many tokens are done when somebody waits for them, others at once."""

    state: SlowState

    def compute(self, shape: StepShape, features: SamplingFeatures) -> Any:
        """A list that the tokens come into."""
        tokens: list[torch.Tensor] = []
        compute = super().compute
        self.state.queue.append(lambda: tokens.append(compute(shape, features)))
        while self.state.queue and shape.num_tokens <= MANY_TOKENS:
            self.state.queue.popleft()()
        return tokens


def slow_fetch(
    requests: Sequence[Request | None], tokens: Any, sampler: Sampler, host_tokens: HostTokens
) -> Callable[[], list[SampledToken]]:
    """M5's `fetch`, from a device that has not computed the tokens yet."""
    queue = sampler.state.queue  # type: ignore[attr-defined]

    def read() -> list[SampledToken]:
        while not tokens:
            queue.popleft()()
        return fetch(requests, tokens[0], sampler, host_tokens)()

    return read
