"""The decoder's weights: merged matrices, filled from a checkpoint's parts one by one.

So merged matrices and their parts are never on the GPU together. On several GPUs a rank keeps a
part of each weight (`Shard` says which), and reads no more of it than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m5_kernels.kernels.int8_weight import Int8Weight
from milestone_llm.core.errors import InputError

from .config import DecoderConfig
from .parallel import Shard

Matrix = torch.Tensor | Int8Weight


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
        quantization: str | None = None,
    ) -> LayerWeights:
        """Of a layer of this shape: what memory holds, and zeros in what may stay unfilled."""
        c, qkv_size = config, (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def matrix(out_size: int, in_size: int) -> Matrix:
            if quantization is not None:
                return Int8Weight.zeros(out_size, in_size, device)
            return empty(out_size, in_size)

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


@dataclass(frozen=True)
class WeightSlice:
    """Where a weight of a checkpoint goes: the part that this rank keeps."""

    target: Matrix
    shape: tuple[int, ...]
    """Of the whole weight."""
    part: tuple[slice, ...]

    def fill(self, weight: Any, dtype: torch.dtype) -> None:
        """Take this rank's part of a weight of the decoder's `dtype`, whatever it is stored in."""
        if isinstance(self.target, Int8Weight):
            rows, columns = self.part  # a scale is that of a whole row, so whole rows are read
            self.target.round_from(weight[rows, :].to(dtype), columns)
        else:
            self.target.copy_(weight[self.part])


def slices_of_weights(
    config: DecoderConfig,
    shard: Shard,
    embedding: torch.Tensor,
    lm_head: Matrix,
    final_norm: torch.Tensor,
    layers: list[LayerWeights],
) -> dict[str, WeightSlice]:
    """Where each weight of a checkpoint goes: a tensor, or its rows of a merged one.

    config: of the whole model; the tensors are this rank's.
    """
    w, cut = config, shard
    hidden, neurons = w.hidden_size, cut.even(w.intermediate_size)
    q = cut.even(w.num_q_heads, w.head_dim)
    kv = cut.kv_heads(w.num_kv_heads, w.head_dim)
    every = slice(None)
    slices: dict[str, WeightSlice] = {}

    def put(name: str, target: Matrix | None, shape: tuple[int, ...], *part: slice) -> None:
        if target is not None:
            slices[name] = WeightSlice(target, shape, part)

    tokens, vocab = cut.vocab(w.vocab_size), (w.vocab_size, hidden)
    num_tokens = tokens.stop - tokens.start
    put("model.embed_tokens.weight", embedding[:num_tokens], vocab, tokens, every)
    if not w.is_tied:
        put("lm_head.weight", lm_head[:num_tokens], vocab, tokens, every)
    put("model.norm.weight", final_norm, (hidden,), every)
    for index, layer in enumerate(layers):
        at = f"model.layers.{index}"
        put(f"{at}.input_layernorm.weight", layer.input_norm, (hidden,), every)
        put(f"{at}.post_attention_layernorm.weight", layer.post_norm, (hidden,), every)
        put(f"{at}.self_attn.q_norm.weight", layer.q_norm, (w.head_dim,), every)
        put(f"{at}.self_attn.k_norm.weight", layer.k_norm, (w.head_dim,), every)
        # By column, which is by rows of a weight that is stored as [output, input].
        sizes = {"q": w.num_q_heads, "k": w.num_kv_heads, "v": w.num_kv_heads}
        own = [part.stop - part.start for part in (q, kv, kv)]
        for kind, qkv, gate_up, columns in (
            ("weight", layer.qkv, layer.gate_up, (hidden,)),
            ("bias", layer.qkv_bias, layer.gate_up_bias, ()),
        ):
            rest = (every,) * len(columns)
            if qkv is not None:
                for (letter, heads), part, target in zip(
                    sizes.items(), (q, kv, kv), qkv.split(own), strict=True
                ):
                    shape = (heads * w.head_dim, *columns)
                    put(f"{at}.self_attn.{letter}_proj.{kind}", target, shape, part, *rest)
            if gate_up is not None:
                shape = (w.intermediate_size, *columns)
                halves = gate_up.split([neurons.stop - neurons.start] * 2)
                for letter, target in zip(("gate", "up"), halves, strict=True):
                    put(f"{at}.mlp.{letter}_proj.{kind}", target, shape, neurons, *rest)
        # By row. A bias belongs to the sum, not to every part of it: rank 0 adds it.
        shape = (hidden, w.num_q_heads * w.head_dim)
        put(f"{at}.self_attn.o_proj.weight", layer.output, shape, every, q)
        shape = (hidden, w.intermediate_size)
        put(f"{at}.mlp.down_proj.weight", layer.down, shape, every, neurons)
        share = slice(hidden if cut.rank == 0 else 0)
        biases = {"self_attn.o_proj": layer.output_bias, "mlp.down_proj": layer.down_bias}
        for name, bias in biases.items():
            put(f"{at}.{name}.bias", bias if bias is None else bias[share], (hidden,), share)
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
