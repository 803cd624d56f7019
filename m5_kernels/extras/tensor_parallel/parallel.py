"""Tensor parallelism: every layer is cut over several GPUs, as Megatron-LM does it.

    hidden (whole, on every rank)
      |  QKV, gate-up    cut by column: a rank computes its own heads, its own neurons
      v
    attention, SiLU * mul               need nothing of the other ranks
      |  output, down    cut by row: a rank's heads and neurons give a part of every sum
      v
    all-reduce           adds the parts up: hidden is whole again, on every rank

So a layer has two all-reduces and no other traffic. Embedding and LM head are cut by vocabulary:
one all-reduce, and one gathering of logits, after which all ranks sample the same token.

    Shoeybi et al., Megatron-LM, 2019, section 3: https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.one_gpu import OneGPU
from m5_kernels.kernels.backend import ceil_div
from m5_kernels.kernels.rms_norm import add_rms_norm
from milestone_llm.core.errors import InputError

from .all_reduce_norm import SymmetricBuffer, all_reduce_add_rms_norm

MAX_ONE_SHOT_ROWS = 512
"""Rows of a decode step whose all-reduce goes by one shot: above, NCCL's rings move less."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in torch 2.13, and before."""

BY_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_ROW = ("o_proj", "down_proj")
BY_VOCAB = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Shard:
    """Which part of every weight a rank keeps."""

    rank: int = 0
    size: int = 1

    def cut(self, config: DecoderConfig) -> DecoderConfig:
        """The shape of one rank's part; the vocabulary stays whole, see `vocab`.

        Raises:
            InputError: heads or neurons do not divide; the message has the numbers.
        """
        if obstacles := self._obstacles(config):
            sizes = range(1, config.num_q_heads + 1)
            possible = [str(n) for n in sizes if not Shard(0, n)._obstacles(config)]
            raise InputError(
                f"tensor_parallel_size={self.size} does not divide the {obstacles[0]} of this "
                f"model; possible: {', '.join(possible)}"
            )
        return replace(
            config,
            num_q_heads=config.num_q_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def _obstacles(self, config: DecoderConfig) -> list[str]:
        q, kv, neurons = config.num_q_heads, config.num_kv_heads, config.intermediate_size
        rests = {
            f"{q} query heads": q % self.size,
            f"{kv} KV heads": kv % self.size and self.size % kv,
            f"{neurons} neurons of the MLP (intermediate_size)": neurons % self.size,
        }
        return [what for what, rest in rests.items() if rest]

    def even(self, count: int, width: int = 1) -> slice:
        """This rank's part of `count` things of `width` elements each."""
        part = count // self.size * width
        return slice(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, count: int, head_dim: int) -> slice:
        """This rank's KV heads. Where there are fewer than ranks, several ranks keep the same."""
        if count >= self.size:
            return self.even(count, head_dim)
        head = self.rank * count // self.size
        return slice(head * head_dim, (head + 1) * head_dim)

    def vocab_rows(self, vocab_size: int) -> int:
        """Tokens a rank has room for: the same on all, so the last may have some of no use."""
        return ceil_div(vocab_size, self.size)

    def vocab(self, vocab_size: int) -> slice:
        """This rank's tokens."""
        first = self.rank * self.vocab_rows(vocab_size)
        end = first + self.vocab_rows(vocab_size)
        return slice(min(first, vocab_size), min(end, vocab_size))

    def slices(self, name: str, whole: DecoderConfig, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """This rank's part of a weight, named as Hugging Face names it, of this shape.

        By column is by rows of a weight that is stored as [output, input]. A bias of what is cut by
        row belongs to the sum, not to every part of it: rank 0 adds it.
        """
        kind, (*_, matrix, _) = name.rpartition(".")[-1], name.split(".")
        every = (slice(None),) * len(shape)
        if matrix in BY_VOCAB:
            return (self.vocab(whole.vocab_size), *every[1:])
        if matrix in ("k_proj", "v_proj"):
            return (self.kv_heads(whole.num_kv_heads, whole.head_dim), *every[1:])
        if matrix in BY_COLUMN:
            return (self.even(shape[0]), *every[1:])
        if matrix in BY_ROW and kind == "bias":
            return (slice(shape[0] if self.rank == 0 else 0),)
        if matrix in BY_ROW:
            return (slice(None), self.even(shape[1]))
        return every


class TensorParallel(OneGPU):
    """A part of every layer here, and sums over all ranks. It takes the place of `OneGPU`.

    Args:
        max_num_seqs: most rows of a decode step.
        smallest: of all ranks' numbers, the smallest.
    """

    def __init__(
        self,
        shard: Shard,
        hidden_size: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
        smallest: Callable[[int], int],
    ) -> None:
        self.shard = shard
        self.smallest_of_all = smallest
        self.buffers: SymmetricBuffer | None = None
        """None: NCCL or gloo does everything."""
        self._turn = 0
        if shard.size > 1 and device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))  # NCCL can't begin within a graph
            with contextlib.suppress(RuntimeError):
                rows = min(max_num_seqs, MAX_ONE_SHOT_ROWS)
                self.buffers = SymmetricBuffer(rows, hidden_size, dtype, device)

    @property
    def all_reduce_name(self) -> str:
        """Which all-reduce a decode step uses."""
        if self.buffers is not None:
            return "one shot over symmetric memory"
        return "NCCL" if dist.get_backend_config().count("nccl") else "gloo"

    def own_part(self, whole: DecoderConfig) -> DecoderConfig:
        """The shape of this rank's part; the vocabulary stays whole, see `vocab_rows`."""
        return self.shard.cut(whole)

    def slices(self, name: str, whole: DecoderConfig, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """See `Shard.slices`."""
        return self.shard.slices(name, whole, shape)

    def vocab_rows(self, vocab_size: int) -> int:
        """Tokens a rank has room for."""
        return self.shard.vocab_rows(vocab_size)

    def embed(
        self, input_ids: torch.Tensor, embedding: torch.Tensor, norm: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the embedding, of which each rank has a part, and their norm."""
        index = input_ids - self.shard.rank * len(embedding)
        is_own = (index >= 0) & (index < len(embedding))
        rows = F.embedding(torch.where(is_own, index, 0), embedding)
        rows = rows.masked_fill(~is_own[:, None], 0)
        residual = torch.zeros_like(rows)
        self._turn = 0
        return residual, self._add_norm(rows, residual, norm, epsilon, buffer=2)

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """`residual +=` the sum of all ranks' `part`; the norm of that."""
        buffer, self._turn = self._turn, 1 - self._turn  # after attention 0, after the MLP 1
        return self._add_norm(part, residual, weight, epsilon, buffer)

    def _add_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        buffer: int,
    ) -> torch.Tensor:
        if self.buffers is not None and len(part) <= self.buffers.max_rows:
            return all_reduce_add_rms_norm(part, residual, weight, epsilon, self.buffers, buffer)
        return add_rms_norm(self.all_reduce(part), residual, weight, epsilon)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, in its place, on every rank."""
        if self.shard.size > 1:
            dist.all_reduce(part)
        return part

    def all_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]` of `[num_rows, vocab_rows]` on each rank."""
        num_rows = len(logits)
        parts = logits.new_empty(self.shard.size * num_rows, logits.shape[1])
        all_gather(parts, logits.contiguous())
        rows = parts.view(self.shard.size, num_rows, -1).transpose(0, 1).reshape(num_rows, -1)
        return rows[:, :vocab_size]

    def smallest(self, number: int) -> int:
        """NCCL: what one rank captures of a sum over all ranks, all must have captured."""
        return self.smallest_of_all(number)

    def lack_of_memory_suppressed(self) -> contextlib.AbstractContextManager[None]:
        """It is not: the others wait for this one's part of a sum, so it ends, and they with it."""
        return contextlib.nullcontext()
