"""CUDA graphs on a CPU: each is computed anew at its replay, so that padding shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from m5_kernels.device_step import DeviceStep
from m5_kernels.extras.guesses.runner import GuessStep
from m5_kernels.sampler import Needs
from m5_kernels.step_graphs import StepGraphs, StepShape


class RecomputedGraphs(StepGraphs):
    """No graphs: a replay computes the step, in buffers that hold nonsense.

    Args:
        capacity: how many graphs memory holds.
    """

    def __init__(self, step: DeviceStep | GuessStep, capacity: int = 1000) -> None:
        plain = step.plain if isinstance(step, GuessStep) else step
        super().__init__(plain.state.step_rows, step.compute, plain.decoder.gpus)
        self.metadata, self.capacity = plain.metadata, capacity
        self.tried: list[tuple[StepShape, Needs]] = []
        self.replayed: list[StepShape] = []

    def _capture(self, bucket: StepShape, needs: Needs) -> Any:
        self.tried.append((bucket, needs))
        if len(self.tried) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        tokens = torch.zeros(bucket.num_seqs, dtype=torch.int32)

        def replay() -> None:
            self.replayed.append(bucket)
            for name, value in vars(self.metadata).items():
                if torch.is_tensor(value) and name != "block_table":
                    value.fill_(2**20)
            tokens.set_(self.compute(bucket, needs))  # those of the step before are being read

        return SimpleNamespace(replay=replay), tokens
