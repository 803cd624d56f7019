"""The part of each weight that a rank keeps, cut as in Megatron-LM.

QKV, gate-up      by column: a rank computes its own heads, its own neurons
output, down      by row: a rank's heads and neurons give a part of every sum
embedding, head   by vocabulary

Shoeybi et al., Megatron-LM, 2019, section 3: https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.shard import Shard
from m5_kernels.kernels.triton_or_twin import ceil_div
from milestone_llm.core.errors import InputError

BY_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_ROW = ("o_proj", "down_proj")
BY_VOCAB = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class RankShard(Shard):
    """Keeps a rank's part of every weight."""

    rank: int = 0
    size: int = 1

    def own_config(self, whole: DecoderConfig) -> DecoderConfig:
        """Return the shape of one rank's part. The vocabulary size stays that of the model, see
        `vocab`.

        Raises:
            InputError: heads or neurons do not divide; the message has the numbers.
        """
        if obstacles := self._obstacles(whole):
            sizes = range(1, whole.num_q_heads + 1)
            possible = [str(n) for n in sizes if not RankShard(0, n)._obstacles(whole)]
            raise InputError(
                f"tensor_parallel_size={self.size} does not divide the {obstacles[0]} of this "
                f"model; possible: {', '.join(possible)}"
            )
        return replace(
            whole,
            num_q_heads=whole.num_q_heads // self.size,
            num_kv_heads=max(1, whole.num_kv_heads // self.size),
            intermediate_size=whole.intermediate_size // self.size,
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
        """Return this rank's part of `count` things of `width` elements each."""
        part = count // self.size * width
        return slice(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, count: int, head_dim: int) -> slice:
        """Return this rank's KV heads. If there are fewer than ranks, some ranks keep the same."""
        if count >= self.size:
            return self.even(count, head_dim)
        head = self.rank * count // self.size
        return slice(head * head_dim, (head + 1) * head_dim)

    def vocab_rows(self, vocab_size: int) -> int:
        """Return how many tokens each rank has room for. The last rank may use less."""
        return ceil_div(vocab_size, self.size)

    def vocab(self, vocab_size: int) -> slice:
        """Return this rank's range of token ids."""
        first = self.rank * self.vocab_rows(vocab_size)
        end = first + self.vocab_rows(vocab_size)
        return slice(min(first, vocab_size), min(end, vocab_size))

    def slices(self, name: str, whole: DecoderConfig, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return this rank's part of a weight.

        name: the weight's name at Hugging Face; shape: of the whole weight. "By column" cuts the
        rows of a stored weight, since it is stored as [output, input]. If a weight is cut by row,
        its bias belongs to the sum, not to every part of it, so only rank 0 adds it.
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
