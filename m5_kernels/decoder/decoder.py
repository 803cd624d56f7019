"""A decoder for llama, mistral, qwen2 and qwen3 that does a layer in nine launches.

The Hugging Face modules launch dozens of kernels a layer and pass most tensors through
memory between them. Here the projections of query, key and value are one matrix, so are those of
gate and up, and what stands between two matrix products is one kernel:

    add + RMSNorm -> QKV -> QK-norm, RoPE, KV write -> attention -> output
    add + RMSNorm -> gate, up -> SiLU * mul -> down

Weights are plain tensors, filled one by one from a checkpoint's (`weights`). A model with a
feature that is not computed here is refused by name (`config`).

Others than the lesson's may be: what multiplies (`products`), what a matrix is (`weights`), where
layers lie (`one_gpu`), when kernels start (`kernels.early_start`), and what rotates and writes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from m5_kernels.kernels.early_start import Starts, next_starts
from m5_kernels.kernels.rope_kv_write import rope_kv_write
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.core.errors import InputError

from .config import DecoderConfig, rope_table
from .one_gpu import OneGPU
from .products import Products, Weight
from .weights import LayerWeights, Matrices, WeightSlice, read_model, slices_of_weights

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: `[num_blocks, block_size, num_kv_heads, head_dim]`."""


class Attends(Protocol):
    """Attention of a step: `attention.Attention`, or what takes its place."""

    def prepare(self, metadata: StepMetadata) -> StepMetadata:
        """With what all layers of a step need."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention for all tokens of a step."""


RopeAndWrite = Callable[..., torch.Tensor]
"""`rope_kv_write`, or what takes its place."""


class FusedDecoder:
    """The model: `forward` gives hidden states, `logits` those of the rows to be sampled."""

    def __init__(
        self,
        config: DecoderConfig,
        cos_sin: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        products: Products | None = None,
        matrices: Matrices | None = None,
        gpus: OneGPU | None = None,
        starts: Starts | None = None,
        rope_and_write: RopeAndWrite = rope_kv_write,
    ) -> None:
        """Weights are what memory holds, except what no checkpoint fills; see `load`.

        config: of the whole model; `self.config` is that of the part which is computed here.
        cos_sin: fp32 `[max_positions, head_dim]`, as `rope_table` makes it.
        """
        self.products = products or Products()
        self.matrices = matrices or Matrices()
        self.gpus = gpus or OneGPU()
        self.starts = starts or Starts(torch.device(device))
        self.rope_kv_write = rope_and_write
        self.whole_config = config
        self.config = c = self.gpus.own_part(config)
        self.cos_sin = cos_sin.to(device)
        vocab_rows = self.gpus.vocab_rows(c.vocab_size)
        self.embedding = torch.zeros(vocab_rows, c.hidden_size, dtype=dtype, device=device)
        self.lm_head = self.matrices.lm_head(self.embedding, c.is_tied)
        self.final_norm = torch.empty(c.hidden_size, dtype=dtype, device=device)
        self.layers = [LayerWeights.empty(c, dtype, device, self.matrices) for _ in c.windows]

    @classmethod
    def from_hf(
        cls,
        model: Any,
        max_positions: int | None = None,
        consume: bool = False,
        **parts: Any,
    ) -> FusedDecoder:
        """Take the weights of a `PreTrainedModel`, in its dtype, on its device.

        max_positions: rows of the rotary table; the config's if None.
        consume: empty each parameter of the model once it is copied; it can't be used after that,
        and there need not be room for it twice.
        parts: objects, as the constructor takes them.
        Raises InputError for a feature or a weight that this decoder does not know, or misses.
        """
        decoder = cls(
            DecoderConfig.of_model(model), rope_table(model.config, max_positions), model.dtype,
            model.device, **parts,
        )  # fmt: skip
        decoder.load(read_model(model, consume))
        return decoder

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy what is kept here of weights, named as Hugging Face names them, one at a time.

        weights: what has a `shape`, or `get_shape`, and gives a tensor when it is sliced.
        """
        slices = self._slices()
        tied_head: torch.Tensor | None = None
        missing = set(slices)
        for name, weight in weights:
            if name == "lm_head.weight" and self.config.is_tied:
                tied_head = weight[slices["model.embed_tokens.weight"].part]
                continue
            if name not in slices:
                raise InputError(f"the fused decoder has no use for the weight {name}")
            own = slices[name]
            shape = tuple(weight.get_shape() if hasattr(weight, "get_shape") else weight.shape)
            if own.shape != shape:
                raise InputError(f"the weight {name} has shape {shape}, not {own.shape}")
            if own.is_matrix:
                self.matrices.fill(own.target, weight, own.part, self.embedding.dtype)
            else:
                own.target.copy_(weight[own.part])
            missing.discard(name)
        if missing:
            raise InputError(f"{len(missing)} weights are missing, {min(missing)} among them")
        if tied_head is not None:
            rows = self.embedding[: len(tied_head)]
            if not torch.equal(tied_head.to(rows), rows):
                text = "tie_word_embeddings is true, and lm_head.weight is not the embedding"
                raise InputError(f"{text}: it must be false in config.json")
        self._tie_head()

    def _slices(self) -> dict[str, WeightSlice]:
        """Where each weight of a checkpoint goes."""
        tensors = self.embedding, self.lm_head, self.final_norm, self.layers
        return slices_of_weights(self.whole_config, self.gpus, *tensors)

    def fill_randomly(self) -> None:
        """Make the weights up, to measure with: matrices small, norms 1."""
        for own in self._slices().values():
            if own.is_matrix:
                self.matrices.fill_randomly(own.target)
            elif len(own.shape) > 1:
                own.target.normal_(std=0.02)
            else:
                own.target.fill_(1)
        self._tie_head()

    def _tie_head(self) -> None:
        if self.config.is_tied:
            self.matrices.tie(self.lm_head, self.embedding)

    @property
    def layers_of_each_kind(self) -> list[int]:
        """The first layer with each window: between them they launch every kernel."""
        windows = self.config.windows
        return [windows.index(window) for window in dict.fromkeys(windows)]

    def token_counts(self, max_tokens: int) -> list[int]:
        """Numbers of tokens, beside the usual ones, for which products have own kernels."""
        layer = self.layers[0]
        matrices = layer.qkv, layer.output, layer.gate_up, layer.down, self.lm_head
        weights = [Weight(each, is_gated=each is layer.gate_up) for each in matrices]
        return self.products.token_counts(max_tokens, weights)

    def of_layers(self, layers: list[int]) -> FusedDecoder:
        """The same weights, of these layers alone."""
        part = copy.copy(self)
        part.layers = [self.layers[layer] for layer in layers]
        windows = tuple(self.config.windows[layer] for layer in layers)
        part.config = dataclasses.replace(self.config, windows=windows)
        return part

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        metadata: StepMetadata,
        caches: KVCaches,
        attend: Attends,
    ) -> torch.Tensor:
        """Hidden states `[num_tokens, hidden_size]` of the tokens `[num_tokens]` of a step.

        Their keys and values are written into `caches`, one pair a layer.
        """
        with next_starts(self.starts.when(len(input_ids), self.layers[0].gate_up)):
            return self._forward(input_ids, metadata, caches, attend)

    def _forward(
        self,
        input_ids: torch.Tensor,
        metadata: StepMetadata,
        caches: KVCaches,
        attend: Attends,
    ) -> torch.Tensor:
        c, gpus, products = self.config, self.gpus, self.products
        first_norm = self.layers[0].input_norm
        residual, hidden = gpus.embed(input_ids, self.embedding, first_norm, c.rms_norm_eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, window, (key_cache, value_cache), next_norm in zip(
            self.layers, c.windows, caches, next_norms, strict=True
        ):
            qkv = products.linear(hidden, layer.qkv, layer.qkv_bias)
            query = self.rope_kv_write(
                qkv, key_cache, value_cache, metadata.slot_mapping, c.num_q_heads,
                metadata.positions, self.cos_sin, layer.q_norm, layer.k_norm, c.rms_norm_eps,
            )  # fmt: skip
            attended = attend(query, key_cache, value_cache, metadata, window=window)
            part = products.linear(attended.flatten(1), layer.output, layer.output_bias)
            hidden = gpus.add_norm(part, residual, layer.post_norm, c.rms_norm_eps)
            neurons = products.gate_up(hidden, layer.gate_up, layer.gate_up_bias)
            part = products.linear(neurons, layer.down, layer.down_bias)
            hidden = gpus.add_norm(part, residual, next_norm, c.rms_norm_eps)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, vocab_size]` for hidden states `[num_rows, hidden_size]`."""
        with next_starts(self.starts.when(len(hidden), self.layers[0].gate_up)):
            logits = self.products.linear(hidden, self.lm_head)
        return self.gpus.all_logits(logits, self.config.vocab_size)

    def allocate_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """Empty keys and values of all layers, in the model's type."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return [
            (self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)) for _ in self.layers
        ]
