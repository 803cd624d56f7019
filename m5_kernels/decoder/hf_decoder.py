"""Hugging Face's modules as a decoder, for families and models that the fused decoder does not
know.

    FusedDecoder   nine launches a layer, merged weights
    HFDecoder      the modules as they are; they call our attention, once a layer

The rest of a step - state on the device, sampling, pipelining - is the same for both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel

from m5_kernels.kernels.kv_write import kv_write
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.core.errors import InputError
from milestone_llm.models.hf_model import with_attention
from milestone_llm.models.kv_shape import KVShape

from .attention import AttentionBackend, AttentionLayer, AttentionShape
from .decoder import KVCaches
from .ops import DecoderOps

NAME = "flash_decoding"


class HFDecoder:
    """Does what `FusedDecoder` does, with the modules of a `PreTrainedModel`.

    Args:
        model: with its weights, which are shared.
        ops: only `attention` is used.

    Raises:
        InputError: the layers of the model cannot be computed without its head, or its values are
            not as wide as its keys.
    """

    must_be_captured = False
    """A step may do what the probe of `can_be_captured` did not do."""
    layers_of_each_kind: tuple[int, ...] = ()
    """Empty: no layer can be computed alone. Kernels are compiled when they are first launched."""

    def __init__(self, model: PreTrainedModel, ops: DecoderOps) -> None:
        self.ops = ops
        self.can_be_captured = False
        """Whether a CUDA graph may hold a step. Modules may ask the device something, as those of
        experts do, or keep something on the host from one call to the next."""
        self.model = with_attention(model, NAME)
        prefix = self.model.base_model_prefix
        if prefix not in self.model._modules:
            raise InputError(f"{type(model).__name__} does not tell its layers from its head")
        # A copy whose layers return the hidden states that they get. What it computes is the head,
        # and anything else that the family does to logits.
        self.head = copy.copy(self.model)
        self.head._modules = {**self.model._modules, prefix: PassThrough()}
        self.shape = KVShape.of(model)
        if self.shape.head_dim != self.shape.value_dim:
            name = f"{type(model).__name__} (model type {model.config.model_type})"
            raise InputError(
                f"{name} cannot be served: it has keys of {self.shape.head_dim} numbers and "
                f"values of {self.shape.value_dim}, as latent attention (MLA) has, and M5's "
                "kernels take one width; M4 serves it"
            )
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self.dtype, self.device = model.dtype, model.device
        self.attention_shape = AttentionShape.of(model)

    @property
    def name(self) -> str:
        """Who computes, in words."""
        return f"Hugging Face's modules{' in CUDA graphs' if self.can_be_captured else ''}"

    def in_graphs(self) -> HFDecoder:
        """Return this decoder as one whose steps CUDA graphs may hold."""
        twin = copy.copy(self)
        twin.can_be_captured = True
        return twin

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        metadata: StepMetadata,
        caches: KVCaches,
        attend: AttentionBackend,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return hidden states `[num_tokens, hidden_size]`. See `FusedDecoder.forward`."""
        output = self.model.base_model(
            input_ids=input_ids[None].long(),
            position_ids=metadata.positions[None].long(),
            use_cache=False,
            attention_metadata=StepAttention(metadata, caches, attend, launch),
        )
        return output[0][0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, launch: Launch = PLAIN) -> torch.Tensor:
        """Return logits `[num_rows, vocab_size]` of hidden states `[num_rows, hidden_size]`."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def of_layers(self, layers: Sequence[int]) -> HFDecoder:
        """Return all layers: they cannot be separated."""
        return self

    def token_counts(self, max_tokens: int) -> list[int]:
        """Return nothing: the library's linear layers have no kernels of ours."""
        return []

    def allocate_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """Return zeroed keys and values of all layers, in the model's dtype."""
        size = (num_blocks, block_size, self.shape.num_kv_heads, self.shape.head_dim)
        return [
            (
                torch.zeros(size, dtype=self.dtype, device=self.device),
                torch.zeros(size, dtype=self.dtype, device=self.device),
            )
            for _ in range(self.shape.num_layers)
        ]


class StepAttention(NamedTuple):
    """What our attention function must know of a step. The modules pass it on unchanged."""

    metadata: StepMetadata
    caches: KVCaches
    attend: AttentionBackend
    launch: Launch


def flash_decoding(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_metadata: StepAttention,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store keys and values, and attend. Hugging Face's modules call this once a layer.

    Args:
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, not repeated for GQA; `value` likewise.
        s_aux: sinks, `[num_heads]`; see `AttentionLayer`.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no attention weights.
    """
    metadata, caches, attend, launch = attention_metadata
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = AttentionLayer(index, sliding_window, scaling, s_aux)
    cache, metadata = caches[layer.index], metadata.of_layer(index)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    kv_write(key, value, *cache, metadata.slot_mapping, launch)
    return attend(query.contiguous(), *cache, metadata, layer, launch)[None], None


class PassThrough(torch.nn.Module):
    """Takes the place of a model's layers, and returns the hidden states that it is given."""

    @property
    def decoder(self) -> PassThrough:
        """This module itself, for heads that call the layers of their base model (OPT's)."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        """Return what a base model returns, where everything except the hidden states is None."""
        return HiddenStates(inputs_embeds)


class HiddenStates:
    """The output of a base model, with hidden states only."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.last_hidden_state,))


AttentionInterface.register(NAME, flash_decoding)
