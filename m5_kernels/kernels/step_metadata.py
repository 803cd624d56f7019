"""The metadata that a step's kernels read, computed on the GPU from rows that are already there.

Each running request has a row of state on the GPU: its token ids, how many of them have their KV
computed, its block table. A step names rows and how many new tokens each computes. The GPU computes
everything else from that: the id and position of each new token, where its KV goes, how long each
context is. So the host sends a few integers a step instead of a tensor per quantity. And since a
sampled token is appended to its row on the GPU, the next step can start before the host has seen
it. Sequences with one new token come first. The number of the first chunk is on the GPU, too, so
that one CUDA graph serves steps of any mixture.

    state rows                 step (2 rows, 1 + 3 new tokens)        expanded
    row 0  a b c d|e . . .     row_ids        [0, 2]                  input_ids    e  x y z
    row 1  (free)              num_new_tokens [1, 3]                  positions    4  0 1 2
    row 2 |x y z . . . . .                                            slots        from block tables
          ^ num_computed_tokens                                       context_lens [5, 3]
                                                                      first_chunk  1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowState:
    """State of all requests on the device, one row each; rows are reused.

    token_ids: int32 `[num_rows, max_model_len]`; block_table: int32 `[num_rows, max_blocks]`;
    num_computed_tokens, prompt_lens: int32 `[num_rows]`.
    """

    token_ids: torch.Tensor
    block_table: torch.Tensor
    num_computed_tokens: torch.Tensor
    prompt_lens: torch.Tensor
    block_size: int


@dataclass(frozen=True)
class StepMetadata:
    """Positions, slots and lengths of a step. Sequences with one new token come first, then chunks.

    `expand_step` fills it, in buffers that may be larger than the step: the rest is padding.

    Per token: input_ids, positions: int32 `[num_tokens]` (0 in padding); slot_mapping: int64
    `[num_tokens]` (-1). Per sequence: context_lens: int32 `[num_seqs]` (0); query_start_loc: int32
    `[num_seqs + 1]`; output_positions: int32 `[num_seqs]`, index of the output token that follows
    (0); decode_lens: int32 `[num_seqs]`, context_lens of the sequences with one new token, 0 for
    others; block_table: int32 `[num_seqs, max_blocks]`, in the order of the step. first_chunk:
    int32 `[1]`, the number of sequences with one new token.

    The host knows two numbers, since launches depend on them: only the first `num_decodes`
    sequences may have one token, and there are at most `num_chunks` chunks.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    output_positions: torch.Tensor
    decode_lens: torch.Tensor
    block_table: torch.Tensor
    first_chunk: torch.Tensor
    num_decodes: int = 0
    num_chunks: int = 0
    chunk_plan: torch.Tensor | None = None
    """What `ChunkAttention.prepare` returned."""
    group: int = 0
    """The group of layers whose block tables and slots these are."""
    groups: tuple[StepMetadata, ...] = ()
    """The same step for each group of layers; empty: all layers are in one group."""
    group_of_layers: Sequence[int] = ()

    def of_layer(self, layer: int) -> StepMetadata:
        """Return the metadata with the block tables of the layer's group."""
        return self.groups[self.group_of_layers[layer]] if self.groups else self

    @classmethod
    def allocate(
        cls, num_tokens: int, num_seqs: int, max_blocks: int, device: torch.device | str
    ) -> StepMetadata:
        """Return buffers for one bucket of tokens and sequences."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            slot_mapping=zeros(num_tokens, dtype=torch.int64),
            context_lens=zeros(num_seqs),
            query_start_loc=zeros(num_seqs + 1),
            output_positions=zeros(num_seqs),
            decode_lens=zeros(num_seqs),
            block_table=zeros(num_seqs, max_blocks),
            first_chunk=zeros(1),
        )

    def part(
        self, num_tokens: int, num_seqs: int, num_decodes: int = 0, num_chunks: int = 0
    ) -> StepMetadata:
        """Return views of the size that a step needs."""
        return StepMetadata(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            context_lens=self.context_lens[:num_seqs],
            query_start_loc=self.query_start_loc[: num_seqs + 1],
            output_positions=self.output_positions[:num_seqs],
            decode_lens=self.decode_lens[:num_seqs],
            block_table=self.block_table[:num_seqs],
            first_chunk=self.first_chunk,
            num_decodes=num_decodes,
            num_chunks=num_chunks,
        )
