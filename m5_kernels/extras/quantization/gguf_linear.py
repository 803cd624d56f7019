"""Linear layers whose weights keep the 4 or 8 bits that a GGUF file has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from m5_kernels.decoder.linear import LinearMethod, Weight
from m5_kernels.extras.devices.cpu_linear import silu_mul_in_place
from m5_kernels.kernels.launch import PLAIN, Launch

from .gguf_file import GGUFFile
from .int4_weight import Int4Weight


@dataclass(frozen=True)
class GGUFLinear(LinearMethod):
    """Linear layers with a file's weights as they are. The embedding is converted to `dtype`."""

    file: GGUFFile = field(kw_only=True)
    _created: list[Int4Weight] = field(default_factory=list)

    def create(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Weight:
        """Return a weight, which has no memory before it is filled."""
        self._created.append(Int4Weight(out_size, in_size))
        return self._created[-1]

    def create_lm_head(self, embedding: torch.Tensor, is_tied: bool) -> Weight:
        """Return the LM head."""
        out_size, in_size = embedding.shape
        return self.create(out_size, in_size, embedding.dtype, embedding.device)

    def load(
        self, target: Weight, weight: Any, part: tuple[slice, ...], dtype: torch.dtype
    ) -> None:
        """Take a weight from the file."""
        target.stored = weight.int4_groups

    def tie(self, lm_head: Weight, embedding: torch.Tensor) -> None:
        """Give the LM head the weights of the embedding."""
        lm_head.stored = self.file.weights["model.embed_tokens.weight"].int4_groups

    def finish(self) -> None:
        """Pack all weights for torch's product, before requests come."""
        for weight in self._created:
            _ = weight.packed

    def apply(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`."""
        return weight.product(hidden, bias)

    def gate_up(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return silu(gate) * up of what `apply` returns."""
        return silu_mul_in_place(weight.product(hidden, bias))
