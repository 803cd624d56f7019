"""One table of the operations that a decoder launches. Extras and benches replace entries of it.

embed_norm       rows of the embedding, and their norm        once a step
linear           linear layers                                QKV, output, gate and up, down, head
rope_kv_write    QK-norm, rotary embedding, KV write
attention        over the paged cache                         created once for all steps
add_norm         the residual stream, and its norm
last_norm        the same, and what the LM head reads         once a step
mlp              what a layer does after attention             created once a layer
all_logits       logits of the whole vocabulary               once a step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.rms_norm import add_rms_norm, embed_rms_norm
from m5_kernels.kernels.rope_kv_write import rope_kv_write

from .attention import Attention, AttentionBackend, AttentionShape
from .config import DecoderConfig
from .linear import LinearMethod
from .mlp import MLP, DenseMLP


def embed_norm(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the embedding, with which the residual stream begins, and their norm.

    input_ids, positions: int32 `[num_tokens]`. Models that rotate by positions do not add them
    here. Both results are `[num_tokens, hidden_size]`.
    """
    residual = embedding.new_empty(len(input_ids), embedding.shape[1])
    return residual, embed_rms_norm(input_ids, embedding, residual, weight, epsilon, launch)


def own_logits(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the logits that were computed here: without other ranks they are all."""
    return logits


@dataclass(frozen=True)
class DecoderOps:
    """The lesson's operations. A replacement is called with the same arguments as the default."""

    linear: LinearMethod = field(default_factory=LinearMethod)
    embed_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = embed_norm
    rope_kv_write: Callable[..., torch.Tensor] = rope_kv_write
    attention: Callable[[AttentionShape, int, torch.dtype, torch.device], AttentionBackend] = (
        Attention
    )
    add_norm: Callable[..., torch.Tensor] = add_rms_norm
    last_norm: Callable[..., torch.Tensor] = add_rms_norm
    mlp: Callable[[int, DecoderConfig, LinearMethod, torch.dtype, torch.device | str], MLP] = (
        DenseMLP.create
    )
    all_logits: Callable[[torch.Tensor, int], torch.Tensor] = own_logits


LESSON = DecoderOps()
