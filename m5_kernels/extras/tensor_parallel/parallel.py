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
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from m5_kernels.kernels.all_reduce_norm import SymmetricBuffer, all_reduce_add_rms_norm
from m5_kernels.kernels.backend import ceil_div
from m5_kernels.kernels.rms_norm import add_rms_norm
from milestone_llm.core.errors import InputError

from .config import DecoderConfig

MAX_ONE_SHOT_ROWS = 512
"""Rows of a decode step whose all-reduce goes by one shot: above, NCCL's rings move less."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in torch 2.13, and before."""


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


class Collectives:
    """The communication between the ranks of a decoder. With one rank it is nothing.

    Args:
        max_num_seqs: most rows of a decode step.
    """

    def __init__(
        self,
        shard: Shard,
        hidden_size: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shard = shard
        self.buffers: SymmetricBuffer | None = None
        """None: NCCL or gloo does everything."""
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

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, in its place, on every rank."""
        if self.shard.size > 1:
            dist.all_reduce(part)
        return part

    def add_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        buffer: int,
        pdl: int,
    ) -> torch.Tensor:
        """`residual +=` the sum of all ranks' `part`; the norm of that.

        Args:
            part: `[num_tokens, hidden_size]`, may be overwritten.
            buffer: see `all_reduce_add_rms_norm`.
        """
        if self.buffers is not None and len(part) <= self.buffers.max_rows:
            return all_reduce_add_rms_norm(
                part, residual, weight, epsilon, self.buffers, buffer, pdl
            )
        return add_rms_norm(self.all_reduce(part), residual, weight, epsilon, pdl)

    def gather_vocab(self, part: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]` of `[num_rows, vocab_rows]` on each rank."""
        num_rows = len(part)
        parts = part.new_empty(self.shard.size * num_rows, part.shape[1])
        all_gather(parts, part.contiguous())
        rows = parts.view(self.shard.size, num_rows, -1).transpose(0, 1).reshape(num_rows, -1)
        return rows[:, :vocab_size]
