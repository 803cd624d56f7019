"""Which bytes of a GGUF file are which weight, by the names that Hugging Face gives them.

Files of the llama family have the rows of queries and keys in another order: they interleave the
two halves of a head, which Hugging Face has one after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from milestone_llm.core.errors import InputError
from milestone_llm.models.checkpoint import find_gguf
from milestone_llm.models.gguf_cache import INDEX

from .int4_weight import Int4Groups

ROOT = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BYTES_OF_A_GROUP = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
PLAIN = {"F32": np.float32, "F16": np.float16}
"""Types of norms and biases."""


class TensorLocation(NamedTuple):
    """Where a tensor is in the file."""

    type: str
    shape: tuple[int, ...]
    """The shape as torch has it: the last dimension is contiguous."""
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class FileWeight:
    """A weight of the file. Slicing it returns a tensor."""

    path: Path
    location: TensorLocation
    num_heads: int | None
    """Number of heads, if its rows are those of queries or keys in the other order; else None."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.location.shape

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        if self.location.type in PLAIN:
            plain = torch.from_numpy(self._bytes().view(PLAIN[self.location.type]))
            return plain.view(self.shape)[part]
        weights = self.int4_groups.weights(torch.float32)
        return weights.unflatten(0, (-1, self.shape[1])).sum(0).T[part]

    @property
    def int4_groups(self) -> Int4Groups:
        """The 4-bit integers of the weight. Q8_0 has twice as many, first all high halves."""
        groups = torch.from_numpy(self._bytes()).view(
            self.shape[0], -1, BYTES_OF_A_GROUP[self.location.type]
        )
        if self.num_heads is not None:
            groups = groups.unflatten(0, (self.num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        groups = groups.permute(1, 2, 0)  # [num_groups, bytes, out_size]
        scale = _fp16(groups[:, :2])
        if self.location.type == "Q4_0":
            return Int4Groups(groups[:, 2:].contiguous(), scale, -8 * scale)
        if self.location.type == "Q4_1":
            return Int4Groups(groups[:, 4:].contiguous(), scale, _fp16(groups[:, 2:4]))
        integers = groups[:, 2:].contiguous().view(torch.int8).int() + 128
        halves = (integers >> 4).byte(), (integers & 15).byte()
        return Int4Groups(
            torch.cat([half[:, :16] | half[:, 16:] << 4 for half in halves]),
            torch.cat((16 * scale, scale)),
            torch.cat((-128 * scale, torch.zeros_like(scale))),
        )

    def _bytes(self) -> np.ndarray:
        location = self.location
        return np.fromfile(self.path, np.uint8, location.num_bytes, offset=location.offset)


def _fp16(two_bytes: torch.Tensor) -> torch.Tensor:
    """Convert bytes `[num_groups, 2, out_size]` of fp16 to fp32 `[num_groups, 1, out_size]`."""
    return two_bytes.mT.contiguous().view(torch.float16).mT.float()


def open_gguf(model: object, device: torch.device) -> GGUFFile:
    """Open the GGUF file of a model.

    Raises:
        InputError: there is no such file, its types are not supported, or the device is not a CPU.
    """
    found = find_gguf(model)
    if found is None:
        raise InputError(f'quantization="gguf" is for a .gguf file, which {model!r:.80} is not')
    if device.type != "cpu":
        raise InputError(
            f'quantization="gguf" is for CPUs, and the model is to be on {device}: take "int8", '
            "or None"
        )
    path, folder = found
    return GGUFFile(path, json.loads((folder / INDEX).read_text(encoding="utf-8")))


class GGUFFile:
    """The weights of a file.

    Args:
        index: where they are in the file, as `tensor_index` returns it.

    Raises:
        InputError: a weight is of a type that is not known here.
    """

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path = path
        self.weights: dict[str, FileWeight] = {}
        """By Hugging Face's names."""
        heads = {"attn_q": index["num_heads"], "attn_k": index["num_kv_heads"]}
        for name, (type_, shape, *where) in index["tensors"].items():
            location = TensorLocation(type_, tuple(shape), *where)
            is_matrix = len(location.shape) > 1
            if type_ not in (BYTES_OF_A_GROUP if is_matrix else PLAIN):
                raise InputError(
                    f'quantization="gguf" knows matrices in {", ".join(BYTES_OF_A_GROUP)}; '
                    f"{name} of {path.name} is {type_}"
                )
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
            if match is None:
                raise InputError(f"{path.name} has a tensor {name}, which is not known here")
            layer, kind, ending = match.groups()
            theirs = (ROOT if layer is None else LAYER).get(kind)
            if theirs is None:
                if kind == "rope_freqs":
                    continue  # the config has the scaling that it stands for
                raise InputError(f"{path.name} has a tensor {name}, which is not known here")
            prefix = "" if layer is None else f"model.layers.{layer}."
            is_turned = index["architecture"] == "llama" and is_matrix
            self.weights[f"{prefix}{theirs}.{ending}"] = FileWeight(
                path, location, heads.get(kind) if is_turned else None
            )

    def __iter__(self) -> Iterator[tuple[str, FileWeight]]:
        return iter(self.weights.items())
