"""The same promise on a CPU, where torch multiplies: every call has a shape that no other request
changes.

A library chooses its loops by the shapes of a product. So rows are multiplied in blocks of
`BLOCK_ROWS`, filled up with zeros, and each query attends alone. torch computes an activation in
vectors, but the numbers after the last whole vector of a thread one by one, and these are rounded
differently. So each row is activated alone, too. All this costs time: it is for comparing bits, not
for speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from m5_kernels.decoder.attention import AttentionLayer, AttentionShape
from m5_kernels.decoder.linear import LinearMethod, Weight
from m5_kernels.decoder.ops import DecoderOps
from m5_kernels.extras.families.mlp import FamilyMLP, activate
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.models.attend import attend

from .invariant_linear import InvariantLinear

BLOCK_ROWS = 16


@dataclass(frozen=True)
class CPUInvariantLinear(InvariantLinear):
    """Linear layers with weights of the model's dtype. Rows of the weight are multiples of 16
    bytes, as on a GPU: otherwise a row's bits depend on its place in the block."""

    def apply(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`."""
        rows = F.pad(hidden, (0, 0, 0, -len(hidden) % BLOCK_ROWS))
        blocks = [F.linear(block, weight, bias) for block in rows.split(BLOCK_ROWS)]
        return torch.cat(blocks)[: len(hidden)]


class RowMLP(FamilyMLP):
    """The MLP of any family, the activation of each row alone."""

    def __call__(self, hidden: torch.Tensor, linear: LinearMethod, launch: Launch) -> torch.Tensor:
        """Return what a layer adds to the residual stream, `[num_tokens, hidden_size]`."""
        neurons = linear.apply(hidden, self.up, self.up_bias, launch)
        rows = [
            activate(row, self.activation, self.is_gated, self.alphas, launch)
            for row in neurons.split(1)
        ]
        return linear.apply(torch.cat(rows), self.down, self.down_bias, launch)


class QueryAttention:
    """Takes the place of `decoder.attention.Attention`: one query after the other."""

    def __init__(
        self, shape: AttentionShape, max_num_seqs: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Needs none of these."""

    def prepare(self, metadata: StepMetadata, launch: Launch) -> StepMetadata:
        """Return the metadata."""
        return metadata

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: AttentionLayer,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Attend for all tokens of a step. See `AttentionBackend`."""
        block_size, num_kv_heads = key_cache.shape[1:3]
        output = query.new_zeros(query.shape)
        for token, table, context_len in queries_of(metadata):
            first = max(0, context_len - (layer.window or context_len))
            places = torch.arange(first, context_len)
            blocks, offsets = table[places // block_size].long(), places % block_size
            keys, values = (
                cache[blocks, offsets].to(query.dtype).transpose(0, 1).contiguous()[None]
                for cache in (key_cache, value_cache)
            )
            own = query[token].unflatten(0, (num_kv_heads, -1)).contiguous()[None]
            output[token] = attend(
                own, keys, values, None, scaling=layer.scale, sinks=layer.sinks
            ).flatten(1, 2)[0]
        return output


def queries_of(metadata: StepMetadata) -> list[tuple[int, torch.Tensor, int]]:
    """Return each token of a step that is not padding: its index, its block table, and the length
    of its context, itself included."""
    m = metadata
    queries = [
        (seq, m.block_table[seq], context_len)
        for seq, context_len in enumerate(m.decode_lens[: m.num_decodes].tolist())
        if context_len
    ]
    if m.num_chunks:
        starts, lens = m.query_start_loc.tolist(), m.context_lens.tolist()
        for seq in range(int(m.first_chunk), len(lens)):
            chunk = range(starts[seq], starts[seq + 1])
            queries += [
                (token, m.block_table[seq], lens[seq] - (chunk.stop - 1 - token)) for token in chunk
            ]
    return queries


CPU_INVARIANT = DecoderOps(linear=CPUInvariantLinear(), attention=QueryAttention, mlp=RowMLP.create)
"""The rest are the twins of the lesson's kernels, which compute each row alone."""
