"""A decoder for llama, mistral, qwen2 and qwen3 that does a layer in nine launches.

The Hugging Face modules launch dozens of kernels a layer and pass most tensors through
memory between them. Here the projections of query, key and value are one matrix, so are those of
gate and up, and what stands between two matrix products is one kernel:

    add + RMSNorm -> QKV -> QK-norm, RoPE, KV write -> attention -> output
    add + RMSNorm -> gate, up -> SiLU * mul -> down

With small weights and a few hundred rows at most, or with one row, SiLU * mul is part of the
product before it (`linear`).

Weights are plain tensors, filled one by one from a checkpoint's (`weights`). A model with a
feature that is not computed here is refused by name (`config`).

On several GPUs each has a part of every layer, and the parts of the sums are added up after output
and after down (`parallel`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from m5_kernels.kernels.backend import EARLY, LATE, is_hopper, supports_pdl
from m5_kernels.kernels.hopper_int8_tiles import token_counts
from m5_kernels.kernels.int8_weight import Int8Weight
from m5_kernels.kernels.linear import linear, takes_registers
from m5_kernels.kernels.rms_norm import embed_rms_norm
from m5_kernels.kernels.rope_kv_write import rope_kv_write
from milestone_llm.core.errors import InputError

from .attention import AttentionMetadata, attend
from .config import DecoderConfig, rope_table
from .parallel import Collectives, Shard
from .weights import LayerWeights, WeightSlice, read_model, slices_of_weights

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: `[num_blocks, block_size, num_kv_heads, head_dim]`."""


class FusedDecoder:
    """The model: `forward` gives hidden states, `logits` those of the rows to be sampled."""

    def __init__(
        self,
        config: DecoderConfig,
        cos_sin: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard | None = None,
        max_num_seqs: int = 1,
        quantization: str | None = None,
    ) -> None:
        """Weights are what memory holds, but for what no checkpoint fills; see `load`.

        config: of the whole model; `self.config` is that of this rank's part.
        cos_sin: fp32 `[max_positions, head_dim]`, as `rope_table` makes it.
        max_num_seqs: most rows of a decode step, whose all-reduces are to be quick.
        quantization: "int8" rounds the matrices that are multiplied with; see `int8_weight`.
        """

        self.shard = shard or Shard()
        self.whole_config = config
        self.config = c = self.shard.cut(config)
        self.collectives = Collectives(
            self.shard, c.hidden_size, max_num_seqs, dtype, torch.device(device)
        )
        vocab_rows = self.shard.vocab_rows(c.vocab_size)
        self.cos_sin = cos_sin.to(device)
        self.embedding = torch.zeros(vocab_rows, c.hidden_size, dtype=dtype, device=device)
        self.lm_head: torch.Tensor | Int8Weight = self.embedding
        if quantization is not None:
            self.lm_head = Int8Weight.zeros(vocab_rows, c.hidden_size, device)
        elif not c.is_tied:
            self.lm_head = torch.zeros_like(self.embedding)
        self.final_norm = torch.empty(c.hidden_size, dtype=dtype, device=device)
        self.layers = [LayerWeights.empty(c, dtype, device, quantization) for _ in c.windows]

    @classmethod
    def from_hf(
        cls,
        model: Any,
        max_positions: int | None = None,
        consume: bool = False,
        quantization: str | None = None,
    ) -> FusedDecoder:
        """Take the weights of a `PreTrainedModel`, in its dtype, on its device.

        max_positions: rows of the rotary table; the config's if None.
        consume: empty each parameter of the model once it is copied; it can't be used after that,
        and there need not be room for it twice.
        quantization: as the constructor takes it.
        Raises InputError for a feature or a weight that this decoder does not know, or misses.
        """
        decoder = cls(
            DecoderConfig.of_model(model), rope_table(model.config, max_positions), model.dtype,
            model.device, quantization=quantization,
        )  # fmt: skip
        decoder.load(read_model(model, consume))
        return decoder

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy this rank's parts of weights, named as Hugging Face names them, one at a time.

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
            own.fill(weight, self.embedding.dtype)
            missing.discard(name)
        if missing:
            raise InputError(f"{len(missing)} weights are missing, {min(missing)} among them")
        if tied_head is not None:
            rows = self.embedding[: len(tied_head)]
            if not torch.equal(tied_head.to(rows), rows):
                text = "tie_word_embeddings is true, and lm_head.weight is not the embedding"
                raise InputError(f"{text}: it must be false in config.json")
        self._round_tied_head()

    def _slices(self) -> dict[str, WeightSlice]:
        """Where each weight of a checkpoint goes."""
        tensors = self.embedding, self.lm_head, self.final_norm, self.layers
        return slices_of_weights(self.whole_config, self.shard, *tensors)

    def fill_randomly(self) -> None:
        """Make the weights up, to measure with: matrices small, norms 1."""
        for own in self._slices().values():
            if isinstance(own.target, Int8Weight):
                shape, tensor = (len(own.target), own.target.in_size), self.embedding
                own.target.round_from(tensor.new_empty(shape).normal_(std=0.02))
            elif len(own.shape) > 1:
                own.target.normal_(std=0.02)
            else:
                own.target.fill_(1)
        self._round_tied_head()

    def _round_tied_head(self) -> None:
        """An embedding is looked up, so it stays as it is; an LM head tied to it gets a copy."""
        if self.config.is_tied and isinstance(self.lm_head, Int8Weight):
            self.lm_head.round_from(self.embedding)

    @property
    def layers_of_each_kind(self) -> list[int]:
        """The first layer with each window: between them they launch every kernel."""
        windows = self.config.windows
        return [windows.index(window) for window in dict.fromkeys(windows)]

    def token_counts(self, max_tokens: int) -> list[int]:
        """Numbers of tokens for which products have kernels of their own, in eight bits."""
        layer, products = self.layers[0], set[tuple[int, int, bool]]()
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down, self.lm_head):
            if isinstance(weight, Int8Weight) and is_hopper(self.embedding.device):
                is_gated = weight is layer.gate_up
                products.add((len(weight) // (1 + is_gated), weight.in_size, is_gated))
        return token_counts(max_tokens, products)

    def of_layers(self, layers: list[int]) -> FusedDecoder:
        """The same weights, of these layers alone."""
        part = copy.copy(self)
        part.layers = [self.layers[layer] for layer in layers]
        windows = tuple(self.config.windows[layer] for layer in layers)
        part.config = dataclasses.replace(self.config, windows=windows)
        return part

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, metadata: AttentionMetadata, caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states `[num_tokens, hidden_size]` of the tokens `[num_tokens]` of a step.

        Their keys and values are written into `caches`, one pair a layer.
        """
        c, add_norm, pdl = self.config, self.collectives.add_norm, self._pdl(len(input_ids))
        residual, hidden = self._embed(input_ids, pdl)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, window, (key_cache, value_cache), next_norm in zip(
            self.layers, c.windows, caches, next_norms, strict=True
        ):
            qkv = linear(hidden, layer.qkv, layer.qkv_bias, pdl=pdl)
            query = rope_kv_write(
                qkv, key_cache, value_cache, metadata.slot_mapping, c.num_q_heads,
                metadata.positions, self.cos_sin, layer.q_norm, layer.k_norm, c.rms_norm_eps,
                pdl,
            )  # fmt: skip
            attended = attend(query, key_cache, value_cache, metadata, window=window, pdl=pdl)
            part = linear(attended.flatten(1), layer.output, layer.output_bias, pdl=pdl)
            hidden = add_norm(part, residual, layer.post_norm, c.rms_norm_eps, 0, pdl)
            neurons = linear(hidden, layer.gate_up, layer.gate_up_bias, is_gated=True, pdl=pdl)
            part = linear(neurons, layer.down, layer.down_bias, pdl=pdl)
            hidden = add_norm(part, residual, next_norm, c.rms_norm_eps, 1, pdl)
        return hidden

    @property
    def late(self) -> int:
        """LATE, or 0 where no kernel starts before the one before it ends."""
        return LATE if supports_pdl(self.embedding.device) else 0

    def _pdl(self, num_tokens: int) -> int:
        """When kernels let the next one start: early, where they are so short that it pays."""
        is_short = takes_registers(num_tokens, self.layers[0].gate_up)
        return EARLY if self.late and is_short and self.shard.size == 1 else self.late

    def _embed(self, input_ids: torch.Tensor, pdl: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the embedding, of which a rank has a part, and their norm."""
        norm, epsilon = self.layers[0].input_norm, self.config.rms_norm_eps
        if self.shard.size == 1:
            residual = self.embedding.new_empty(len(input_ids), self.config.hidden_size)
            return residual, embed_rms_norm(input_ids, self.embedding, residual, norm, epsilon, pdl)
        index = input_ids - self.shard.rank * len(self.embedding)
        is_own = (index >= 0) & (index < len(self.embedding))
        rows = F.embedding(torch.where(is_own, index, 0), self.embedding)
        rows = rows.masked_fill(~is_own[:, None], 0)
        residual = torch.zeros_like(rows)
        return residual, self.collectives.add_norm(rows, residual, norm, epsilon, 2, pdl)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, vocab_size]` for hidden states `[num_rows, hidden_size]`."""
        part = linear(hidden, self.lm_head, pdl=self._pdl(len(hidden)))
        if self.shard.size == 1:
            return part
        return self.collectives.gather_vocab(part, self.config.vocab_size)

    def allocate_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """Empty keys and values of all layers, in the model's type."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return [
            (self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)) for _ in self.layers
        ]
