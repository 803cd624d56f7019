"""A decoder that does a layer in nine launches: llama's, and by `families` others.

Hugging Face's modules launch dozens of kernels a layer and pass most tensors through memory between
them. Here query, key and value are one linear layer with a merged weight, and so are gate and up.
Everything between two linear layers is one kernel:

    add + RMSNorm -> QKV -> QK-norm, RoPE, KV write -> attention -> output
    add + RMSNorm -> gate, up -> SiLU * mul -> down

One table (`ops`) names what is launched, and its entries can be replaced. Weights are filled one by
one from a checkpoint (`weights`), each with the part that is kept here (`shard`). A model with a
feature that is not computed here is refused, and the message names the feature (`config`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import EARLY
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.core.errors import InputError

from .attention import AttentionBackend, AttentionShape
from .config import DecoderConfig
from .layer import Layer, Norm
from .linear import LinearWeight
from .ops import LESSON, DecoderOps
from .shard import Shard
from .weights import Converted, StoredWeight, WeightSlice, slices_of_weights

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: `[num_blocks, block_size, num_kv_heads, head_dim]`."""


class FusedDecoder:
    """The model: `forward` returns hidden states, `logits` the logits of rows to be sampled.

    Args:
        config: of the whole model; `self.config` is that of the part that is computed here.
        cos_sin: fp32 `[num_tables, max_positions, head_dim]`, as `rope_tables` returns it.
        ops: the table of what is launched.
        shard: which part of each weight is kept here.
    """

    name = "fused decoder"
    can_be_captured = must_be_captured = True
    """A forward reads nothing from the device: if a CUDA graph cannot hold it, that is a bug."""

    def __init__(
        self,
        config: DecoderConfig,
        cos_sin: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: DecoderOps | None = None,
        shard: Shard | None = None,
    ) -> None:
        self.ops = ops or LESSON
        self.shard = shard or Shard()
        self.whole_config = config
        self.config = c = self.shard.own_config(config)
        self.dtype, self.device, self.vocab_size = dtype, torch.device(device), c.vocab_size
        self.cos_sin = cos_sin.to(device)
        # `load` fills what is left uninitialised here. What a checkpoint may lack is zeros.
        vocab_rows = self.shard.vocab_rows(c.vocab_size)
        self.embedding = torch.zeros(vocab_rows, c.hidden_size, dtype=dtype, device=device)
        self.lm_head = self.ops.linear.create_lm_head(self.embedding, c.is_tied)
        self.final_norm: Norm
        self.layers: Sequence[Layer]
        self.create_layers()

    # -- a step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        metadata: StepMetadata,
        caches: KVCaches,
        attend: AttentionBackend,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return hidden states `[num_tokens, hidden_size]` of the tokens `[num_tokens]` of a step.

        The keys and values of these tokens are written into `caches`, one pair a layer.
        """
        c, ops, launch = self.config, self.ops, self.timed(launch, len(input_ids))
        residual, hidden = ops.embed_norm(
            input_ids, metadata.positions, self.embedding, self.layers[0].input_norm,
            c.rms_norm_eps, launch,
        )  # fmt: skip
        next_norms = [(ops.add_norm, layer.input_norm) for layer in self.layers[1:]]
        next_norms.append((ops.last_norm, self.final_norm))
        for layer, cache, (norm, weight) in zip(self.layers, caches, next_norms, strict=True):
            own = metadata.of_layer(layer.attention.index)
            qkv = ops.linear.apply(hidden, layer.qkv, layer.qkv_bias, launch)
            query = ops.rope_kv_write(
                qkv, *cache, own.slot_mapping, c.num_q_heads, own.positions,
                layer.cos_sin, layer.q_norm, layer.k_norm, c.rms_norm_eps, launch,
            )  # fmt: skip
            attended = attend(query, *cache, own, layer.attention, launch).flatten(1)
            part = ops.linear.apply(attended, layer.output, layer.output_bias, launch)
            hidden = ops.add_norm(part, residual, layer.post_norm, c.rms_norm_eps, launch)
            part = layer.mlp(hidden, ops.linear, launch)
            hidden = norm(part, residual, weight, c.rms_norm_eps, launch)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, launch: Launch = PLAIN) -> torch.Tensor:
        """Return logits `[num_rows, vocab_size]` of hidden states `[num_rows, hidden_size]`."""
        launch = self.timed(launch, len(hidden))
        logits = self.ops.linear.apply(hidden, self.lm_head, None, launch)
        return self.ops.all_logits(logits, self.vocab_size)

    def timed(self, launch: Launch, num_tokens: int) -> Launch:
        """Return a launch with EARLY, if that pays off for so many tokens and there is PDL."""
        largest = self.layers[0].linear_weights[0].weight
        if launch.pdl and self.ops.linear.starts_early(num_tokens, largest):
            return replace(launch, pdl=EARLY)
        return launch

    # -- weights -----------------------------------------------------------------------------

    def create_layers(self) -> None:
        """Create the layers and the last norm, not yet filled.

        Raises:
            InputError: the lesson's operations do not compute this model.
        """
        c, ops = self.config, self.ops
        if not c.is_lesson:
            raise InputError("the lesson's operations do not compute this model")
        self.final_norm = torch.empty(c.hidden_size, dtype=self.dtype, device=self.device)
        self.layers = [
            Layer.create(index, c, self.cos_sin, ops.linear, ops.mlp, self.dtype, self.device)
            for index in range(len(c.windows))
        ]

    def name_of(self, name: str) -> str:
        """Return what a checkpoint's weight is called here."""
        return name

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy what is kept here of each weight, one at a time. Weights have Hugging Face's names.

        weights: objects that have a `shape`, or `get_shape`, and return a tensor when they are
        sliced.

        Raises:
            InputError: a weight is missing, is not known here, or has another shape.
        """
        slices, embedding = self.slices(), "model.embed_tokens.weight"
        tied_head: torch.Tensor | None = None
        missing = set(slices)
        for name, weight in ((self.name_of(name), weight) for name, weight in weights):
            is_tied_head = name == "lm_head.weight" and self.config.is_tied
            own = slices.get(embedding if is_tied_head else name)
            if own is None:
                raise InputError(f"the fused decoder has no use for the weight {name}")
            shape = tuple(weight.get_shape() if hasattr(weight, "get_shape") else weight.shape)
            if own.shape != shape:
                raise InputError(f"the weight {name} has shape {shape}, not {own.shape}")
            if is_tied_head:
                tied_head = weight[own.part]
                continue
            if own.convert is not None:
                weight = Converted(weight, own.convert)
            if own.is_linear:
                self.ops.linear.load(own.target, weight, own.part, self.dtype)
            else:
                own.target.copy_(weight[own.part])
            missing.discard(name)
        if tied_head is not None:
            rows = self.embedding[: len(tied_head)]
            if embedding in missing:
                rows.copy_(tied_head)
                missing.remove(embedding)
            elif not torch.equal(tied_head.to(rows), rows):
                text = "tie_word_embeddings is true, and lm_head.weight is not the embedding"
                raise InputError(f"{text}: it must be false in config.json")
        if missing:
            raise InputError(f"{len(missing)} weights are missing, {min(missing)} among them")
        self._finish()

    def load_randomly(self) -> None:
        """Make weights up, to measure with: small random numbers, and 1 in norms."""
        for own in self.slices().values():
            if own.is_linear:
                self.ops.linear.load_randomly(own.target)
            elif len(own.shape) > 1:
                own.target.normal_(std=0.02)
            else:
                own.target.fill_(1)
        self._finish()

    def slices(self) -> dict[str, WeightSlice]:
        """Return where each weight of a checkpoint goes, by its name."""
        return slices_of_weights(self.stored(), self.whole_config, self.shard)

    def stored(self) -> list[StoredWeight]:
        """Return where a checkpoint's weights go."""
        whole = self.whole_config
        vocab = (whole.vocab_size, whole.hidden_size)
        lm_head = None if whole.is_tied else self.lm_head
        stored = [
            StoredWeight(self.embedding, (("model.embed_tokens.weight", *vocab),)),
            StoredWeight(lm_head, (("lm_head.weight", *vocab),)),
            StoredWeight(self.final_norm, (("model.norm.weight", whole.hidden_size),)),
        ]
        return stored + [each for layer in self.layers for each in layer.stored(whole)]

    def _finish(self) -> None:
        if self.config.is_tied:
            self.ops.linear.tie(self.lm_head, self.embedding)
        self.ops.linear.finish()

    # -- what else a step asks ---------------------------------------------------------------

    @property
    def max_positions(self) -> int:
        """The number of positions that a token may have."""
        return self.cos_sin.shape[1]

    @property
    def attention_shape(self) -> AttentionShape:
        """The shape of what is computed here, the same in every layer."""
        return AttentionShape(
            self.config.num_q_heads, self.config.num_kv_heads, self.config.head_dim
        )

    @property
    def layers_of_each_kind(self) -> tuple[int, ...]:
        """The first layer of each kind. Together they launch every kernel."""
        kinds = [layer.kind for layer in self.layers]
        return tuple(kinds.index(kind) for kind in dict.fromkeys(kinds))

    def of_layers(self, layers: Sequence[int]) -> FusedDecoder:
        """Return a decoder that has only these layers, with the same weights."""
        part = copy.copy(self)
        part.layers = [self.layers[layer] for layer in layers]
        return part

    def token_counts(self, max_tokens: int) -> list[int]:
        """Return further numbers of tokens for which linear layers have kernels of their own."""
        weights = [*self.layers[0].linear_weights, LinearWeight(self.lm_head, is_gated=False)]
        of_linear = self.ops.linear.token_counts(max_tokens, weights)
        mlps = [self.layers[index].mlp for index in self.layers_of_each_kind]
        return sorted({*of_linear, *(each for mlp in mlps for each in mlp.token_counts())})

    def allocate_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """Return zeroed keys and values of all layers, in the model's dtype."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return [
            (self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)) for _ in self.layers
        ]
