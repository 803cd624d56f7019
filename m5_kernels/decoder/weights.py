"""The decoder's weights: merged matrices, filled from a checkpoint's parts one by one.

So merged matrices and their parts are never on the GPU together. What is kept of a weight, and what
it is made into, are two objects' to say: `one_gpu.OneGPU` and `Matrices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from milestone_llm.core.errors import InputError

from .config import DecoderConfig
from .one_gpu import OneGPU
from .products import Matrix


class Matrices:
    """What the matrices are that a decoder multiplies with: tensors, as the checkpoint has them."""

    def empty(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Matrix:
        """Room for one."""
        return torch.empty(out_size, in_size, dtype=dtype, device=device)

    def fill(
        self, target: Matrix, weight: Any, part: tuple[slice, ...], dtype: torch.dtype
    ) -> None:
        """Take part of a weight of the decoder's `dtype`, whatever it is stored in."""
        target.copy_(weight[part])

    def fill_randomly(self, target: Matrix) -> None:
        """Make one up, to measure with."""
        target.normal_(std=0.02)

    def lm_head(self, embedding: torch.Tensor, is_tied: bool) -> Matrix:
        """Room for the LM head, which may be the embedding."""
        return embedding if is_tied else torch.zeros_like(embedding)

    def tie(self, lm_head: Matrix, embedding: torch.Tensor) -> None:
        """The embedding is filled, and the LM head is tied to it."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer, as `F.linear` takes them: `[output size, input size]`."""

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        matrices: Matrices,
    ) -> LayerWeights:
        """Of a layer of this shape: what memory holds, and zeros in what may stay unfilled."""
        c, qkv_size = config, (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def matrix(out_size: int, in_size: int) -> Matrix:
            return matrices.empty(out_size, in_size, dtype, device)

        def zeros_if(is_there: bool, *shape: int) -> torch.Tensor | None:
            return empty(*shape).zero_() if is_there else None

        return cls(
            input_norm=empty(c.hidden_size),
            qkv=matrix(qkv_size, c.hidden_size),
            qkv_bias=zeros_if(c.has_qkv_bias, qkv_size),
            q_norm=zeros_if(c.has_qk_norm, c.head_dim),
            k_norm=zeros_if(c.has_qk_norm, c.head_dim),
            output=matrix(c.hidden_size, c.num_q_heads * c.head_dim),
            output_bias=zeros_if(c.has_output_bias, c.hidden_size),
            post_norm=empty(c.hidden_size),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=zeros_if(c.has_mlp_bias, 2 * c.intermediate_size),
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=zeros_if(c.has_mlp_bias, c.hidden_size),
        )


class WeightSlice(NamedTuple):
    """Where a weight of a checkpoint goes, and the part of it that goes there."""

    target: Matrix
    shape: tuple[int, ...]
    """Of the whole weight."""
    part: tuple[slice, ...]
    is_matrix: bool
    """Whether it is multiplied with, and so one of `Matrices`."""


def slices_of_weights(
    whole: DecoderConfig,
    gpus: OneGPU,
    embedding: torch.Tensor,
    lm_head: Matrix,
    final_norm: torch.Tensor,
    layers: list[LayerWeights],
) -> dict[str, WeightSlice]:
    """Where each weight of a checkpoint goes: a tensor, or its rows of a merged one.

    whole: of the whole model; the tensors are what is kept here of it.
    """
    w, hidden, neurons = whole, whole.hidden_size, whole.intermediate_size
    q_size, kv_size = w.num_q_heads * w.head_dim, w.num_kv_heads * w.head_dim
    slices: dict[str, WeightSlice] = {}

    def own_rows(name: str, *shape: int) -> int:
        """How many rows of a weight are kept here."""
        return len(range(shape[0])[gpus.slices(name, w, shape)[0]])

    def put(name: str, target: Matrix | None, *shape: int, is_matrix: bool = False) -> None:
        if target is not None:
            slices[name] = WeightSlice(target, shape, gpus.slices(name, w, shape), is_matrix)

    def put_below(merged: Matrix | None, *weights: tuple[Any, ...]) -> None:
        """Weights, each with its name and shape, that lie below each other in a merged one."""
        if merged is None:
            return
        targets = merged.split([own_rows(*weight) for weight in weights])
        for (name, *shape), target in zip(weights, targets, strict=True):
            put(name, target, *shape, is_matrix=len(shape) > 1)

    vocab = (w.vocab_size, hidden)
    num_tokens = own_rows("model.embed_tokens.weight", *vocab)
    put("model.embed_tokens.weight", embedding[:num_tokens], *vocab)
    if not w.is_tied:
        put("lm_head.weight", lm_head[:num_tokens], *vocab, is_matrix=True)
    put("model.norm.weight", final_norm, hidden)
    for index, layer in enumerate(layers):
        at = f"model.layers.{index}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        put(f"{at}.input_layernorm.weight", layer.input_norm, hidden)
        put(f"{at}.post_attention_layernorm.weight", layer.post_norm, hidden)
        put(f"{attention}.q_norm.weight", layer.q_norm, w.head_dim)
        put(f"{attention}.k_norm.weight", layer.k_norm, w.head_dim)
        put_below(
            layer.qkv,
            (f"{attention}.q_proj.weight", q_size, hidden),
            (f"{attention}.k_proj.weight", kv_size, hidden),
            (f"{attention}.v_proj.weight", kv_size, hidden),
        )
        put_below(
            layer.qkv_bias,
            (f"{attention}.q_proj.bias", q_size),
            (f"{attention}.k_proj.bias", kv_size),
            (f"{attention}.v_proj.bias", kv_size),
        )
        put(f"{attention}.o_proj.weight", layer.output, hidden, q_size, is_matrix=True)
        put_below(
            layer.gate_up,
            (f"{mlp}.gate_proj.weight", neurons, hidden),
            (f"{mlp}.up_proj.weight", neurons, hidden),
        )
        put_below(
            layer.gate_up_bias,
            (f"{mlp}.gate_proj.bias", neurons),
            (f"{mlp}.up_proj.bias", neurons),
        )
        put(f"{mlp}.down_proj.weight", layer.down, hidden, neurons, is_matrix=True)
        for name, bias in (
            (f"{attention}.o_proj", layer.output_bias),
            (f"{mlp}.down_proj", layer.down_bias),
        ):
            if bias is not None:
                put(f"{name}.bias", bias[: own_rows(f"{name}.bias", hidden)], hidden)
    return slices


def read_model(model: Any, consume: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a `PreTrainedModel`; `consume` empties each when the next is asked for."""
    for name, parameter in model.named_parameters():
        yield name, parameter.data
        if consume:
            parameter.data = parameter.data.new_empty(0)


def read_safetensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The weights of a folder; each is read when, and as far as, it is sliced."""
    from safetensors import safe_open

    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise InputError(f"{folder} holds no *.safetensors file")
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tensors.get_slice(name)
