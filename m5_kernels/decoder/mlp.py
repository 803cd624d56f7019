"""The MLP of a layer: its weights, their names in a checkpoint, its linear layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from m5_kernels.kernels.launch import Launch

from .config import DecoderConfig
from .linear import LinearMethod, LinearWeight, Weight
from .weights import StoredWeight, zeros_if


class MLP(Protocol):
    """What a layer does after attention: `DenseMLP`, or what takes its place."""

    def __call__(self, hidden: torch.Tensor, linear: LinearMethod, launch: Launch) -> torch.Tensor:
        """Return what a layer adds to the residual stream, `[num_tokens, hidden_size]`.

        It may be part of a CUDA graph: nothing is read from the device.
        """

    def stored(self, prefix: str, whole: DecoderConfig) -> list[StoredWeight]:
        """Return where the weights of a checkpoint go. prefix: how their names begin."""

    @property
    def weights(self) -> list[LinearWeight]:
        """The weights of its linear layers, the largest first; none: it has kernels of its own."""

    def token_counts(self) -> Iterable[int]:
        """Return numbers of tokens that launch other kernels of its own than fewer tokens do."""


@dataclass(frozen=True)
class DenseMLP:
    """Compute down(SiLU(gate) * up). Gate and up are one linear layer, perhaps with SiLU * mul."""

    gate_up: Weight
    gate_up_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None

    @classmethod
    def create(
        cls,
        index: int,
        config: DecoderConfig,
        linear: LinearMethod,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> DenseMLP:
        """Return the MLP of a layer, not yet filled. Biases that may stay unfilled are zeros.

        index: of the layer. Here all layers are alike.
        """
        hidden, neurons = config.hidden_size, config.intermediate_size
        return cls(
            gate_up=linear.create(2 * neurons, hidden, dtype, device),
            gate_up_bias=zeros_if(config.has_mlp_bias, 2 * neurons, dtype, device),
            down=linear.create(hidden, neurons, dtype, device),
            down_bias=zeros_if(config.has_mlp_bias, hidden, dtype, device),
        )

    def __call__(self, hidden: torch.Tensor, linear: LinearMethod, launch: Launch) -> torch.Tensor:
        """Return what a layer adds to the residual stream, `[num_tokens, hidden_size]`."""
        neurons = linear.gate_up(hidden, self.gate_up, self.gate_up_bias, launch)
        return linear.apply(neurons, self.down, self.down_bias, launch)

    def stored(self, prefix: str, whole: DecoderConfig) -> list[StoredWeight]:
        """Return where the weights of a checkpoint go. prefix: how their names begin."""
        hidden, neurons = whole.hidden_size, whole.intermediate_size
        gate, up, down = (f"{prefix}.{name}_proj" for name in ("gate", "up", "down"))
        return [
            StoredWeight(
                self.gate_up,
                ((f"{gate}.weight", neurons, hidden), (f"{up}.weight", neurons, hidden)),
            ),
            StoredWeight(self.gate_up_bias, ((f"{gate}.bias", neurons), (f"{up}.bias", neurons))),
            StoredWeight(self.down, ((f"{down}.weight", hidden, neurons),)),
            StoredWeight(self.down_bias, ((f"{down}.bias", hidden),)),
        ]

    @property
    def weights(self) -> list[LinearWeight]:
        """The weights of the linear layers, the largest first."""
        return [LinearWeight(self.gate_up, True), LinearWeight(self.down, False)]

    def token_counts(self) -> Iterable[int]:
        """Return none: `LinearMethod` knows those of linear layers."""
        return ()
