"""A step as the device computes it: from the rows' state to the tokens appended to them.

Nothing here waits for the device or asks it anything, so all of it can be part of a CUDA graph:

    rows of state -> metadata -> hidden states -> logits -> tokens -> appended to the rows
"""

from __future__ import annotations

import copy

import torch

from m3_paged.block_cache import BlockCache

from .config import EngineConfig
from .decoder.attention import Attention, ChunkAttention
from .decoder.decoder import Attends, FusedDecoder
from .device_state import DeviceState
from .kernels.early_start import next_starts
from .kernels.expand_step import append_sampled, expand_step
from .kernels.flash_decode import DecodeWorkspace
from .kernels.step_metadata import StepMetadata
from .sampler import Needs, Sampler
from .step_graphs import StepShape


class DeviceStep:
    """Computes steps of rows of `state`, which says what is in them.

    Args:
        state: has room for as many rows as may run.
        chunks: the kernel for chunks, if it is to be another than the lesson's.
        attention: for all tokens, if it is to be another.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        cache: BlockCache,
        state: DeviceState,
        config: EngineConfig,
        max_model_len: int,
        chunks: ChunkAttention | None = None,
        attention: Attends | None = None,
    ) -> None:
        device, shape = decoder.embedding.device, decoder.config
        self.decoder = decoder
        self.kv_caches = list(zip(cache.keys, cache.values, strict=True))
        self.state = state
        self.sampler = Sampler(state)
        most = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
        self.max_tokens = max(most, state.num_seqs)
        self.metadata = StepMetadata.allocate(
            self.max_tokens, state.num_seqs, state.max_blocks, device
        )
        workspace: DecodeWorkspace | None = None
        if device.type == "cuda":
            workspace = DecodeWorkspace.allocate(
                state.num_seqs, shape.num_q_heads, shape.num_kv_heads, shape.head_dim,
                decoder.embedding.dtype, device,
            )  # fmt: skip
        self.attention = attention or Attention(workspace, chunks)

    def of_layers(self, layers: list[int]) -> DeviceStep:
        """The same with these layers alone."""
        part = copy.copy(self)
        part.decoder = self.decoder.of_layers(layers)
        part.kv_caches = [self.kv_caches[layer] for layer in layers]
        return part

    def compute(self, shape: StepShape, needs: Needs) -> torch.Tensor:
        """A token for each sequence, int32 `[num_seqs]`, of use where it samples."""
        hidden, metadata = self.hidden(shape)
        return self.sample(hidden, metadata, needs)

    def hidden(self, shape: StepShape) -> tuple[torch.Tensor, StepMetadata]:
        """Hidden states of all new tokens, `[num_tokens, hidden_size]`."""
        metadata = self.metadata.part(
            shape.num_tokens, shape.num_seqs, shape.num_decodes, shape.num_chunks
        )
        rows, new_tokens, _ = self.state.step(shape.num_seqs)
        expand_step(self.state.rows, rows, new_tokens, metadata)
        metadata = self.attention.prepare(metadata)
        hidden = self.decoder.forward(metadata.input_ids, metadata, self.kv_caches, self.attention)
        return hidden, metadata

    def sample(self, hidden: torch.Tensor, metadata: StepMetadata, needs: Needs) -> torch.Tensor:
        """Sample after each sequence's last new token, and append that to the rows that sample."""
        rows, new_tokens, samples = self.state.step(len(metadata.context_lens))
        logits = self.decoder.logits(last_of_seqs(hidden, metadata))
        with next_starts(self.decoder.starts.late):
            tokens = self.sampler.sample(logits, rows, metadata.output_positions, needs)
            append_sampled(self.state.rows, rows, new_tokens, samples, tokens)
        return tokens


def last_of_seqs(hidden: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
    """The hidden state of each sequence's last new token, `[num_seqs, hidden_size]`."""
    return hidden[metadata.query_start_loc[1:] - 1] if metadata.num_chunks else hidden
