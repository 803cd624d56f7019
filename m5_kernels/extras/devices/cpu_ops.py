"""The operations of a layer between its linear layers, on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from m5_kernels.kernels.launch import PLAIN, Launch

FEW_ROWS = 16
"""Up to so many rows, a norm takes as long as its calls do."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return RMSNorm of `[num_tokens, hidden_size]`.

    `F.rms_norm` consists of eight kernels, and with few rows each costs more to call than to run.
    LayerNorm is one kernel. It is the same norm if the mean is 0, as the mean of `[x, -x]` is.
    """
    num_tokens, size = hidden.shape
    if num_tokens > FEW_ROWS:
        return F.rms_norm(hidden, weight.shape, weight, epsilon)
    both = torch.cat((hidden, -hidden), dim=-1)
    return torch.layer_norm(both, (2 * size,), eps=epsilon)[:, :size] * weight


def embed_norm(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the embedding, with which the residual stream begins, and their norm."""
    residual = F.embedding(input_ids, embedding)
    return residual, rms_norm(residual, weight, epsilon)


def add_norm(
    part: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Add `part` to the residual stream, in place, and return the norm of the sum."""
    return rms_norm(residual.add_(part), weight, epsilon)


class RopeAndWrite:
    """Takes the place of `rope_kv_write`, and rotates queries and keys of a token together.

    A rotated element is `x * cos + (the element it is paired with) * sin`, where the sine's sign is
    changed in the first half of a head.
    """

    def __init__(self) -> None:
        self._positions: torch.Tensor | None = None
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Cosines and sines of the step with these positions, for each table of them:
        fp32 `[num_tokens, 1, head_dim]`."""
        self._kept: torch.Tensor | None = None
        """bool `[num_tokens]`: which tokens of that step are not padding. None: all of them."""

    def __call__(
        self,
        qkv: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_q_heads: int,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        epsilon: float = 1e-6,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Do what `rope_kv_write` does. All layers of a step must pass the same `positions`."""
        num_kv_heads, head_dim = key_cache.shape[2:]
        if positions is not self._positions:
            self._positions = positions
            self._angles.clear()
            self._kept = slot_mapping >= 0 if slot_mapping.amin() < 0 else None
        table = cos_sin.data_ptr()
        if table not in self._angles:
            cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
            self._angles[table] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        cos, sin = self._angles[table]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        query, key = rotated[:, :num_q_heads], rotated[:, num_q_heads:]
        if q_norm is not None and k_norm is not None:
            query.copy_(F.rms_norm(query, q_norm.shape, q_norm.to(query), epsilon))
            key.copy_(F.rms_norm(key, k_norm.shape, k_norm.to(key), epsilon))
        paired = rotated.roll(head_dim // 2, -1)
        rotated.copy_((rotated * cos).addcmul_(paired, sin))  # sums in fp32
        if (kept := self._kept) is not None:
            slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
        for cache, new in ((key_cache, key), (value_cache, value)):
            cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, new)
        return query
