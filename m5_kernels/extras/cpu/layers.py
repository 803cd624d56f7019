"""What stands between two products of a layer, on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from m5_kernels.decoder.one_gpu import OneGPU

FEW_ROWS = 16
"""Up to so many, a norm takes the time of its calls."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of `[num_tokens, hidden_size]`.

    `F.rms_norm` makes it of eight kernels, and for few rows each costs more to call than to run.
    LayerNorm is one kernel, and the same norm where the mean is 0, as that of `[x, -x]` is.
    """
    num_tokens, size = hidden.shape
    if num_tokens > FEW_ROWS:
        return F.rms_norm(hidden, weight.shape, weight, epsilon)
    both = torch.cat((hidden, -hidden), dim=-1)
    return torch.layer_norm(both, (2 * size,), eps=epsilon)[:, :size] * weight


class OneCPU(OneGPU):
    """Norms by torch's own kernels."""

    def embed(
        self,
        input_ids: torch.Tensor,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the embedding, which begin the residual stream, and their norm."""
        residual = F.embedding(input_ids, embedding)
        return residual, rms_norm(residual, norm, epsilon)

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """`residual += part`, and the norm of that."""
        return rms_norm(residual.add_(part), weight, epsilon)


class RopeAndWrite:
    """Takes the place of `rope_kv_write`: queries and keys of a token are rotated together.

    A rotated element is `x * cos + (the element it is paired with) * sin`, with the sine's sign
    changed in the first half of a head.
    """

    def __init__(self) -> None:
        self._positions: torch.Tensor | None = None
        self._cos = self._sin = torch.empty(0)
        """Of the step with these positions: fp32 `[num_tokens, 1, head_dim]`."""
        self._kept: torch.Tensor | None = None
        """bool `[num_tokens]`: which tokens of that step are not padding, if any are."""

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
    ) -> torch.Tensor:
        """As `rope_kv_write`. Layers of one step are given the same tensor of positions."""
        num_kv_heads, head_dim = key_cache.shape[2:]
        if positions is not self._positions:
            self._positions = positions
            cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
            self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            self._kept = slot_mapping >= 0 if slot_mapping.amin() < 0 else None
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        query, key = rotated[:, :num_q_heads], rotated[:, num_q_heads:]
        if q_norm is not None and k_norm is not None:
            query.copy_(F.rms_norm(query, q_norm.shape, q_norm, epsilon))
            key.copy_(F.rms_norm(key, k_norm.shape, k_norm, epsilon))
        paired = rotated.roll(head_dim // 2, -1)
        rotated.copy_((rotated * self._cos).addcmul_(paired, self._sin))  # sums in fp32
        if (kept := self._kept) is not None:
            slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
        for cache, new in ((key_cache, key), (value_cache, value)):
            cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, new)
        return query
