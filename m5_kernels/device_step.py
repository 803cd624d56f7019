"""A step as the device computes it: from the rows' state to the tokens appended to them.

Nothing here waits for the device or reads from it, so all of it can be part of a CUDA graph:

    rows of state -> metadata -> hidden states -> logits -> tokens -> appended to the rows
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from m3_paged.block_cache import BlockCache

from .config import EngineConfig
from .decoder.load import Decoder
from .device_state import DeviceState
from .kernels.expand_step import append_sampled, expand_step
from .kernels.launch import Launch
from .kernels.step_metadata import StepMetadata
from .sampler import Sampler, SamplingFeatures
from .step_graphs import StepShape

if TYPE_CHECKING:
    from .kernels.expand_groups import GroupTables


class DeviceStep:
    """Compute steps from the state of their rows.

    Args:
        state: has a row for each request that may run.
        launch: how kernels are launched; None: as suits the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: BlockCache,
        state: DeviceState,
        config: EngineConfig,
        max_model_len: int,
        launch: Launch | None = None,
    ) -> None:
        device = decoder.device
        self.decoder = decoder
        self.kv_caches = list(zip(cache.keys, cache.values, strict=True))
        self.state = state
        self.sampler = Sampler(state)
        self.launch = launch or Launch.on(device)
        most = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
        self.max_tokens = max(most, state.num_seqs)
        self.metadata = StepMetadata.allocate(
            self.max_tokens, state.num_seqs, state.max_blocks, device
        )
        self.group_tables: GroupTables | None = None
        if len(state.block_tables) > 1:  # the layers are in groups
            from .kernels.expand_groups import GroupTables

            self.group_tables = GroupTables(state.block_tables, self.metadata, cache.block_size)
        self.group_of_layers = cache.group_of_layers
        self.attention = decoder.ops.attention(
            decoder.attention_shape, state.num_seqs, cache.keys[0].dtype, device
        )

    def compile_only(self) -> DeviceStep:
        """Return a copy of this step that only compiles its kernels, with a layer of each kind."""
        part, layers = copy.copy(self), self.decoder.layers_of_each_kind
        part.decoder = self.decoder.of_layers(layers)
        part.kv_caches = [self.kv_caches[layer] for layer in layers]
        part.launch = replace(self.launch, only_compiles=True)
        return part

    def compute(self, shape: StepShape, features: SamplingFeatures) -> torch.Tensor:
        """Return a token for each sequence, int32 `[num_seqs]`; valid for those that sample."""
        hidden, metadata = self.hidden(shape)
        return self.sample(hidden, metadata, features)

    def hidden(self, shape: StepShape) -> tuple[torch.Tensor, StepMetadata]:
        """Return hidden states of all new tokens, `[num_tokens, hidden_size]`, and the metadata."""
        metadata = self.metadata.part(
            shape.num_tokens, shape.num_seqs, shape.num_decodes, shape.num_chunks
        )
        rows, new_tokens, _ = self.state.step(shape.num_seqs)
        expand_step(self.state.rows, rows, new_tokens, metadata, self.launch)
        metadata = self.attention.prepare(metadata, self.launch)
        metadata = self.in_groups(metadata, rows)
        hidden = self.decoder.forward(
            metadata.input_ids, metadata, self.kv_caches, self.attention, self.launch
        )
        return hidden, metadata

    def in_groups(self, metadata: StepMetadata, row_ids: torch.Tensor) -> StepMetadata:
        """Return the metadata of a step with that of each group of layers, if there are several."""
        if self.group_tables is None:
            return metadata
        groups = self.group_tables.expand(metadata, row_ids, self.launch)
        return replace(metadata, groups=groups, group_of_layers=self.group_of_layers)

    def sample(
        self, hidden: torch.Tensor, metadata: StepMetadata, features: SamplingFeatures
    ) -> torch.Tensor:
        """Sample after each sequence's last new token. Append the token to the rows that sample."""
        rows, new_tokens, samples = self.state.step(len(metadata.context_lens))
        logits = self.decoder.logits(last_of_seqs(hidden, metadata), self.launch)
        tokens = self.sampler.sample(logits, rows, metadata.output_positions, features, self.launch)
        append_sampled(self.state.rows, rows, new_tokens, samples, tokens, self.launch)
        return tokens


def last_of_seqs(hidden: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
    """Return the hidden state of each sequence's last new token, `[num_seqs, hidden_size]`."""
    return hidden[metadata.query_start_loc[1:] - 1] if metadata.num_chunks else hidden
