"""The operations of a layer between its linear layers, on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from m5_kernels.kernels.launch import PLAIN, Launch

FEW_ROWS = 16
"""Up to so many rows, a norm takes as long as its calls do."""


class TwoSigns(NamedTuple):
    """The residual stream of few rows: each of them, `x`, with `-x`. So every mean is 0."""

    both: torch.Tensor
    """`[num_tokens, 2, hidden_size]`, `x` and `-x`; the others are views of it."""
    plus: torch.Tensor
    minus: torch.Tensor


def embed_norm(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> tuple[Any, torch.Tensor]:
    """Return rows of the embedding, with which the residual stream begins, and their norm.

    The first is what `add_norm` takes, `TwoSigns` or a tensor. The decoder only passes it on.
    """
    residual = F.embedding(input_ids, embedding)
    if len(residual) > FEW_ROWS:
        return residual, rms_norm(residual, weight, epsilon)
    both = torch.stack((residual, -residual), dim=1)
    few = TwoSigns(both, *both.unbind(1))
    return few, rms_norm(few, weight, epsilon)


def add_norm(
    part: torch.Tensor,
    residual: torch.Tensor | TwoSigns,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Add `part` to the residual stream, in place, and return the norm of the sum."""
    if isinstance(residual, TwoSigns):
        residual.plus.add_(part)
        residual.minus.sub_(part)
    else:
        residual.add_(part)
    return rms_norm(residual, weight, epsilon)


def rms_norm(
    residual: torch.Tensor | TwoSigns, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Return RMSNorm of the residual stream, `[num_tokens, hidden_size]`.

    `F.rms_norm` consists of eight kernels, and with few rows each costs more to call than to run.
    LayerNorm is one kernel, and the same norm if the mean is 0.
    """
    if isinstance(residual, TwoSigns):
        both = residual.both
        return torch.layer_norm(both, both.shape[1:], eps=epsilon).select(1, 0) * weight
    return F.rms_norm(residual, weight.shape, weight, epsilon)


class RopeStep:
    """What the layers of a step share to rotate queries and keys: angles, and memory."""

    def __init__(
        self,
        num_q_heads: int,
        key_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self.positions = positions
        self.kept = slot_mapping >= 0 if slot_mapping.amin() < 0 else None
        """bool `[num_tokens]`: which tokens are not padding. None: all of them."""
        self.angles: dict[int, tuple[torch.Tensor, ...]] = {}
        """Cosines, sines and their negatives, for each table: fp32 `[num_tokens, 1, ..]`."""
        num_kv_heads, head_dim = key_cache.shape[2:]
        shape = len(positions), num_q_heads + num_kv_heads, head_dim
        self.before, self.after = torch.empty(2, *shape)
        """Queries and keys of a layer in fp32."""
        self.halves = *self.before.chunk(2, dim=-1), *self.after.chunk(2, dim=-1)
        self.rotated = key_cache.new_empty(shape)
        self.query, self.key = self.rotated.split([num_q_heads, num_kv_heads], dim=1)

    def rotate(self, heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Fill `query` and `key` with rotated `heads`, `[num_tokens, num_heads, head_dim]`.

        A rotated element is `x * cos + (the element it is paired with) * sin`, where the sine's
        sign is changed in the first half of a head.
        """
        table = cos_sin.data_ptr()
        if table not in self.angles:
            cos, sin = cos_sin.index_select(0, self.positions)[:, None].chunk(2, dim=-1)
            self.angles[table] = torch.cat((cos, cos), -1), sin, -sin
        cos, sin, minus_sin = self.angles[table]
        first, second, rotated_first, rotated_second = self.halves
        self.before.copy_(heads)
        torch.mul(self.before, cos, out=self.after)
        rotated_first.addcmul_(second, minus_sin)
        rotated_second.addcmul_(first, sin)
        self.rotated.copy_(self.after)


class RopeAndWrite:
    """Takes the place of `rope_kv_write`, and rotates queries and keys of a token together."""

    def __init__(self) -> None:
        self._step: RopeStep | None = None
        """The last step."""

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
        """Do what `rope_kv_write` does. All layers of a step must pass the same `positions`.

        The queries are valid until the next layer's.
        """
        num_kv_heads, head_dim = key_cache.shape[2:]
        step = self._step
        if step is None or step.positions is not positions:
            step = self._step = RopeStep(num_q_heads, key_cache, slot_mapping, positions)
        num_rotated = num_q_heads + num_kv_heads
        heads = qkv.view(len(qkv), -1, head_dim)
        rotated, value = heads.split_with_sizes([num_rotated, num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            query, key = rotated[:, :num_q_heads], rotated[:, num_q_heads:]
            query.copy_(F.rms_norm(query, q_norm.shape, q_norm.to(query), epsilon))
            key.copy_(F.rms_norm(key, k_norm.shape, k_norm.to(key), epsilon))
        step.rotate(rotated, cos_sin)
        key = step.key
        if (kept := step.kept) is not None:
            slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
        for cache, new in ((key_cache, key), (value_cache, value)):
            cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, new)
        return step.query
