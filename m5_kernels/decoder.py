"""A decoder for llama, mistral, qwen2 and qwen3 that does a layer in nine launches.

The Hugging Face modules launch some thirty kernels a layer and pass most tensors through
memory between them. Here the projections of query, key and value are one matrix, so are those of
gate and up, and what stands between two matrix products is one kernel:

    add + RMSNorm -> QKV -> QK-norm, RoPE, KV write -> attention -> output
    add + RMSNorm -> gate, up -> SiLU * mul -> down

Weights are plain tensors, filled one by one from a checkpoint's, so that the merged matrices and
their parts are never on the GPU together. A model with a feature that is not computed here is
refused by name (`decoder_config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from m5_kernels.kernels.backend import supports_pdl
from m5_kernels.kernels.rms_norm import add_rms_norm, rms_norm
from m5_kernels.kernels.rope_kv_write import rope_kv_write
from m5_kernels.kernels.silu_mul import silu_mul
from m5_kernels.kernels.skinny_linear import skinny_linear

from .attention import AttentionMetadata, attend
from .decoder_config import DecoderConfig, rope_table

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: `[num_blocks, block_size, num_kv_heads, head_dim]`."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer, as `F.linear` takes them: `[output size, input size]`."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class FusedDecoder:
    """The model: `forward` gives hidden states, `logits` those of the rows to be sampled."""

    def __init__(
        self,
        config: DecoderConfig,
        cos_sin: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Weights are left as they are found; fill them with `load`.

        cos_sin: fp32 `[max_positions, head_dim]`, as `rope_table` makes it.
        """

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def empty_if(is_there: bool, *shape: int) -> torch.Tensor | None:
            return empty(*shape) if is_there else None

        c = config
        qkv_size = (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim
        self.config = config
        self.cos_sin = cos_sin.to(device)
        self.embedding = empty(c.vocab_size, c.hidden_size)
        self.lm_head = self.embedding if c.is_tied else empty(c.vocab_size, c.hidden_size)
        self.final_norm = empty(c.hidden_size)
        self.layers = [
            LayerWeights(
                input_norm=empty(c.hidden_size),
                qkv=empty(qkv_size, c.hidden_size),
                qkv_bias=empty_if(c.has_qkv_bias, qkv_size),
                q_norm=empty_if(c.has_qk_norm, c.head_dim),
                k_norm=empty_if(c.has_qk_norm, c.head_dim),
                output=empty(c.hidden_size, c.num_q_heads * c.head_dim),
                output_bias=empty_if(c.has_output_bias, c.hidden_size),
                post_norm=empty(c.hidden_size),
                gate_up=empty(2 * c.intermediate_size, c.hidden_size),
                gate_up_bias=empty_if(c.has_mlp_bias, 2 * c.intermediate_size),
                down=empty(c.hidden_size, c.intermediate_size),
                down_bias=empty_if(c.has_mlp_bias, c.hidden_size),
            )
            for _ in c.windows
        ]

    @classmethod
    def from_hf(
        cls,
        model: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_positions: int | None = None,
        consume: bool = False,
    ) -> FusedDecoder:
        """Take the weights of a `PreTrainedModel`, or of a folder with config and safetensors.

        dtype, device: the model's (a folder's: its config's dtype, and the CPU) if None.
        max_positions: rows of the rotary table; the config's if None.
        consume: empty each parameter of the model once it is copied; it can't be used after that,
        and a model that is on `device` already needs no room there twice.
        Raises ValueError for a feature or a weight that this decoder does not know, or misses.
        """
        if isinstance(model, (str, Path)):
            from transformers import AutoConfig  # slow to import, and only needed here

            hf_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            dtype = dtype or hf_config.dtype or torch.float32
            device = device or "cpu"
            weights = _read_safetensors(Path(model))
        else:
            hf_config = model.config
            dtype, device = dtype or model.dtype, device or model.device
            weights = _read_model(model, consume)
        config = DecoderConfig.from_hf(hf_config)
        decoder = cls(config, rope_table(hf_config, max_positions), dtype, device)
        decoder.load(weights)
        return decoder

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights, named as Hugging Face names them, into their place, one at a time."""
        places = self._places()
        missing = set(places)
        for name, weight in weights:
            if name == "lm_head.weight" and self.config.is_tied:
                continue
            if name not in places:
                raise ValueError(f"the fused decoder has no place for the weight {name}")
            if places[name].shape != weight.shape:
                shapes = f"{tuple(weight.shape)}, not {tuple(places[name].shape)}"
                raise ValueError(f"the weight {name} has shape {shapes}")
            places[name].copy_(weight)
            missing.discard(name)
        if missing:
            raise ValueError(f"{len(missing)} weights are missing, {min(missing)} among them")

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, metadata: AttentionMetadata, caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states `[num_tokens, hidden_size]` of the tokens `[num_tokens]` of a step.

        Their keys and values are written into `caches`, one pair a layer.
        """
        c, pdl = self.config, supports_pdl(input_ids.device)
        residual = F.embedding(input_ids, self.embedding)
        hidden = rms_norm(residual, self.layers[0].input_norm, c.rms_norm_eps, pdl=pdl)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, window, (key_cache, value_cache), next_norm in zip(
            self.layers, c.windows, caches, next_norms, strict=True
        ):
            qkv = skinny_linear(hidden, layer.qkv, layer.qkv_bias, pdl=pdl)
            query = rope_kv_write(
                qkv, key_cache, value_cache, metadata.slot_mapping, c.num_q_heads,
                metadata.positions, self.cos_sin, layer.q_norm, layer.k_norm, c.rms_norm_eps,
                pdl,
            )  # fmt: skip
            attended = attend(query, key_cache, value_cache, metadata, window=window, pdl=pdl)
            hidden = skinny_linear(attended.flatten(1), layer.output, layer.output_bias, pdl=pdl)
            hidden = add_rms_norm(hidden, residual, layer.post_norm, c.rms_norm_eps, pdl)
            gate_up = skinny_linear(hidden, layer.gate_up, layer.gate_up_bias, pdl=pdl)
            hidden = skinny_linear(silu_mul(gate_up, pdl), layer.down, layer.down_bias, pdl=pdl)
            hidden = add_rms_norm(hidden, residual, next_norm, c.rms_norm_eps, pdl)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, vocab_size]` for hidden states `[num_rows, hidden_size]`."""
        return skinny_linear(hidden, self.lm_head, pdl=supports_pdl(hidden.device))

    def allocate_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """Empty keys and values of all layers, in the model's type."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return [
            (self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)) for _ in self.layers
        ]

    def _places(self) -> dict[str, torch.Tensor]:
        """Where each weight of a checkpoint goes: a tensor, or its rows of a merged one."""
        c = self.config
        qkv_sizes = [c.num_q_heads * c.head_dim] + 2 * [c.num_kv_heads * c.head_dim]
        places = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not c.is_tied:
            places["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            merged: dict[str, torch.Tensor | None] = {
                "input_layernorm.weight": layer.input_norm,
                "self_attn.q_norm.weight": layer.q_norm,
                "self_attn.k_norm.weight": layer.k_norm,
                "self_attn.o_proj.weight": layer.output,
                "self_attn.o_proj.bias": layer.output_bias,
                "post_attention_layernorm.weight": layer.post_norm,
                "mlp.down_proj.weight": layer.down,
                "mlp.down_proj.bias": layer.down_bias,
            }
            for kind, qkv, gate_up in (
                ("weight", layer.qkv, layer.gate_up),
                ("bias", layer.qkv_bias, layer.gate_up_bias),
            ):
                if qkv is not None:
                    for letter, part in zip("qkv", qkv.split(qkv_sizes), strict=True):
                        merged[f"self_attn.{letter}_proj.{kind}"] = part
                if gate_up is not None:
                    gate, up = gate_up.chunk(2)
                    merged |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
            for name, place in merged.items():
                if place is not None:
                    places[f"model.layers.{index}.{name}"] = place
        return places


def _read_model(model: Any, consume: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.data
        if consume:
            parameter.data = parameter.data.new_empty(0)


def _read_safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{folder} holds no *.safetensors file")
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tensors.get_tensor(name)
