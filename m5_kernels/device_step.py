"""A step as the device computes it: from the rows' state to the tokens appended to them.

Nothing here waits for the device or asks it anything, so all of it can be part of a CUDA graph:

    rows of state -> metadata -> hidden states -> logits -> tokens -> appended to the rows
"""

from __future__ import annotations

import copy

import torch

from m3_paged.block_cache import BlockCache

from .config import EngineConfig
from .decoder.attention import AttentionMetadata
from .decoder.decoder import FusedDecoder
from .device_state import DeviceState
from .kernels.decode_parts import DecodeWorkspace
from .kernels.expand_step import append_sampled, expand_step
from .kernels.guesses import accept, propose
from .kernels.prefill_tiles import prefill_tiles, runs_on_hopper
from .kernels.step_metadata import StepMetadata
from .sampler import Needs, Sampler
from .step_graphs import MAX_TOKENS, StepShape


class DeviceStep:
    """Computes steps of rows of `state`, which says what is in them."""

    def __init__(
        self, decoder: FusedDecoder, cache: BlockCache, config: EngineConfig, max_model_len: int
    ) -> None:
        device, shape = decoder.embedding.device, decoder.config
        self.decoder = decoder
        self.kv_caches = list(zip(cache.keys, cache.values, strict=True))
        self.max_guess_rows = 0
        """Of a step with guesses: a request has a row for each, beside its own."""
        if config.speculation:
            self.max_guess_rows = config.num_rows_that_guess * (1 + config.num_speculative_tokens)
        num_places = max(config.max_num_seqs, self.max_guess_rows)
        self.state = DeviceState(
            config.max_num_seqs, max_model_len, cache.block_size, shape.vocab_size, device,
            num_places,
        )  # fmt: skip
        self.sampler = Sampler(self.state, decoder.late)
        most = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
        self.max_tokens = max(most, num_places)
        self.metadata = StepMetadata.allocate(
            self.max_tokens, num_places, self.state.max_blocks, device
        )
        self.workspace: DecodeWorkspace | None = None
        if device.type == "cuda":
            self.workspace = DecodeWorkspace.allocate(
                num_places, shape.num_q_heads, shape.num_kv_heads, shape.head_dim,
                decoder.embedding.dtype, device, has_guesses=self.max_guess_rows > 0,
            )  # fmt: skip

    def of_layers(self, layers: list[int]) -> DeviceStep:
        """The same with these layers alone."""
        part = copy.copy(self)
        part.decoder = self.decoder.of_layers(layers)
        part.kv_caches = [self.kv_caches[layer] for layer in layers]
        return part

    def compute(self, shape: StepShape, needs: Needs) -> torch.Tensor:
        """A token for each row, int32 `[num_rows]`, of use where the row samples."""
        hidden, metadata = self.hidden(shape)
        return self.sample(hidden, metadata, shape, needs)

    def hidden(self, shape: StepShape) -> tuple[torch.Tensor, StepMetadata]:
        """Hidden states of all new tokens, `[num_tokens, hidden_size]`."""
        state, metadata = self.state, self.metadata.part(shape.num_tokens, shape.num_rows)
        step_rows, new_tokens, _ = state.step(shape.num_rows)
        offsets = None
        if shape.has_guesses:
            offsets = state.step_offsets[: shape.num_rows]
            propose(state.rows, step_rows, state.step_wanted[: shape.num_rows])
        expand_step(state.rows, step_rows, new_tokens, metadata, offsets)
        attention = AttentionMetadata(
            metadata.positions,
            metadata.slot_mapping,
            metadata.block_table,
            metadata.context_lens,
            metadata.query_start_loc,
            metadata.decode_lens,
            metadata.first_chunk,
            shape.num_decodes,
            shape.num_chunks,
            self.workspace,
            self._chunk_tiles(shape, metadata),
            offsets,
        )
        return self.decoder.forward(metadata.input_ids, attention, self.kv_caches), metadata

    def sample(
        self, hidden: torch.Tensor, metadata: StepMetadata, shape: StepShape, needs: Needs
    ) -> torch.Tensor:
        """Sample behind each row's last new token, and append that to the rows that sample."""
        state = self.state
        step_rows, new_tokens, samples = state.step(shape.num_rows)
        logits = self.decoder.logits(last_of_rows(hidden, metadata, shape))
        tokens = self.sampler.sample(logits, step_rows, metadata.output_positions, needs)
        if shape.has_guesses:
            offsets = state.step_offsets[: shape.num_rows]
            step_rows, tokens = accept(state.rows, step_rows, offsets, tokens)
            new_tokens = new_tokens + offsets
        append_sampled(state.rows, step_rows, new_tokens, samples, tokens, self.decoder.late)
        return tokens

    def _chunk_tiles(self, shape: StepShape, metadata: StepMetadata) -> torch.Tensor | None:
        """For the kernel for Hopper, in steps that are too large for a graph; else None.

        In small ones, few programs would have work, and `paged_prefill` makes more of them.
        """
        keys = self.kv_caches[0][0]
        head_dim, block_size = self.decoder.config.head_dim, self.state.rows.block_size
        if shape.num_tokens <= MAX_TOKENS or not shape.num_chunks:
            return None
        if not runs_on_hopper(keys.device, keys.dtype, head_dim, block_size):
            return None
        return prefill_tiles(
            metadata.context_lens, metadata.query_start_loc, metadata.first_chunk,
            shape.num_tokens, shape.num_chunks,
        )  # fmt: skip


def last_of_rows(hidden: torch.Tensor, metadata: StepMetadata, shape: StepShape) -> torch.Tensor:
    """The hidden state of each row's last new token, `[num_rows, hidden_size]`."""
    return hidden[metadata.query_start_loc[1:] - 1] if shape.num_chunks else hidden
