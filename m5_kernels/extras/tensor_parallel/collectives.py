"""Tensor parallelism: every layer is cut over several GPUs, and an all-reduce adds up the parts.

    hidden (whole, on every rank)
      |  QKV, gate-up    cut by column: a rank computes its own heads, its own neurons
      v
    attention, SiLU * mul               need nothing of the other ranks
      |  output, down    cut by row: a rank's heads and neurons give a part of every sum
      v
    all-reduce           adds the parts up: hidden is whole again, on every rank

So a layer has two all-reduces and no other traffic. Embedding and LM head are cut by vocabulary.
They need one all-reduce and one all-gather of logits, and then all ranks sample the same token.

    Shoeybi et al., Megatron-LM, 2019, section 3: https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.rms_norm import add_rms_norm

from .all_reduce_norm import SymmetricBuffer, all_reduce_add_rms_norm

MAX_ONE_SHOT_ROWS = 512
"""Most rows of a step for the one-shot all-reduce. With more, NCCL's rings move less data."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in torch 2.13, or before."""


class Collectives:
    """Sums over all ranks, in the place of the lesson's norms: entries of `DecoderOps`.

    Args:
        max_num_seqs: most rows of a decode step.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        hidden_size: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rank, self.size = rank, size
        self.buffers: SymmetricBuffer | None = None
        """None: NCCL or gloo does all all-reduces."""
        self._turn = 0
        if size > 1 and device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))  # NCCL can't be set up inside a graph
            with contextlib.suppress(RuntimeError):
                rows = min(max_num_seqs, MAX_ONE_SHOT_ROWS)
                self.buffers = SymmetricBuffer(rows, hidden_size, dtype, device)

    @property
    def all_reduce_name(self) -> str:
        """The all-reduce that a decode step uses, in words."""
        if self.buffers is not None:
            return "one shot over symmetric memory"
        return "NCCL" if dist.get_backend_config().count("nccl") else "gloo"

    def embed_norm(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        embedding: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        launch: Launch = PLAIN,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of the embedding, of which each rank has a part, and their norm."""
        index = input_ids - self.rank * len(embedding)
        is_own = (index >= 0) & (index < len(embedding))
        rows = F.embedding(torch.where(is_own, index, 0), embedding)
        rows = rows.masked_fill(~is_own[:, None], 0)
        residual = torch.zeros_like(rows)
        self._turn = 0
        return residual, self._add_norm(rows, residual, weight, epsilon, 2, launch)

    def add_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Add the sum of all ranks' `part` to `residual`, in place, and return the norm of that."""
        buffer, self._turn = self._turn, 1 - self._turn  # 0 after attention, 1 after the MLP
        return self._add_norm(part, residual, weight, epsilon, buffer, launch)

    def _add_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        buffer: int,
        launch: Launch,
    ) -> torch.Tensor:
        if self.buffers is not None and len(part) <= self.buffers.max_rows:
            return all_reduce_add_rms_norm(
                part, residual, weight, epsilon, self.buffers, buffer, launch
            )
        return add_rms_norm(self.all_reduce(part), residual, weight, epsilon, launch)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Replace `part` by the sum of all ranks' parts, on every rank, and return it."""
        if self.size > 1:
            dist.all_reduce(part)
        return part

    def all_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return logits `[num_rows, vocab_size]`, from `[num_rows, vocab_rows]` on each rank."""
        num_rows = len(logits)
        parts = logits.new_empty(self.size * num_rows, logits.shape[1])
        all_gather(parts, logits.contiguous())
        rows = parts.view(self.size, num_rows, -1).transpose(0, 1).reshape(num_rows, -1)
        return rows[:, :vocab_size]
