"""Which bytes of a GGUF file are which weight, by the names that Hugging Face gives them.

Files of the llama family have the rows of queries and keys in another order: they interleave the
two halves of a head, which Hugging Face has one after the other.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from milestone_llm.core.errors import InputError
from milestone_llm.models.checkpoint import find_gguf
from milestone_llm.models.gguf_cache import INDEX

from .gguf_words import EXACT, dequantized, int4_groups
from .int4_weight import Int4Groups

log = logging.getLogger(__name__)

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


class TensorLocation(NamedTuple):
    """Where a tensor is in the file."""

    type: str
    shape: tuple[int, ...]
    """The shape as torch has it: the last dimension is contiguous."""
    offset: int
    num_bytes: int
    file: str = ""
    """Name of the file that it is in, if a model has several."""


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
        return dequantized(self._rows(), self.location.type).view(self.shape)[part]

    @property
    def int4_groups(self) -> Int4Groups:
        """The 4-bit integers of the weight."""
        return int4_groups(self._rows(), self.location.type, self.shape[1])

    def _rows(self) -> torch.Tensor:
        """Return the bytes of the rows, uint8 `[num_rows, bytes_of_a_row]`, in the order of Hugging
        Face; those of a vector are one row."""
        location = self.location
        data = np.fromfile(self.path, np.uint8, location.num_bytes, offset=location.offset)
        rows = torch.from_numpy(data).view(self.shape[0] if len(self.shape) > 1 else 1, -1)
        if self.num_heads is not None:
            rows = rows.unflatten(0, (self.num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return rows


def open_gguf(model: object, device: torch.device) -> GGUFFile:
    """Open the GGUF file of a model.

    Raises:
        InputError: there is no such file, or the device is not a CPU.
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
        InputError: it has a tensor that is not known here.
    """

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path = path
        self.weights: dict[str, FileWeight] = {}
        """By Hugging Face's names."""
        heads = {"attn_q": index["num_heads"], "attn_k": index["num_kv_heads"]}
        for name, (type_, shape, *where) in index["tensors"].items():
            location = TensorLocation(type_, tuple(shape), *where)
            is_matrix = len(location.shape) > 1
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
                path.parent / location.file if location.file else path,
                location,
                heads.get(kind) if is_turned else None,
            )
        matrices = [own.location for own in self.weights.values() if len(own.shape) > 1]
        rounded = Counter(each.type for each in matrices if each.type not in EXACT)
        if rounded:
            names = ", ".join(f"{count} in {kind}" for kind, count in sorted(rounded.items()))
            log.warning(
                "%s: of %d matrices %s are rounded to 8 bits, with a scale for 32 columns, since "
                "there is no product of their own", path.name, len(matrices), names,
            )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[str, FileWeight]]:
        return iter(self.weights.items())
