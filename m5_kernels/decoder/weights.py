"""Where a checkpoint's weights go: each into a tensor of the decoder, or into rows of a merged one.

Merged weights are filled part by part, so that a merged weight and all its parts are never in
memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from .config import DecoderConfig
from .linear import Weight
from .shard import Shard

EMBEDDINGS = ("embed_tokens.weight", "embed_positions.weight")

Convert = Callable[[torch.Tensor], torch.Tensor]
"""Changes a weight of a checkpoint, or the part that is kept here, while it is loaded."""


class StoredWeight(NamedTuple):
    """A weight of the decoder, and the checkpoint's weights that are its rows, in this order."""

    target: Weight | None
    """None: the model has no such weight."""
    parts: tuple[tuple[Any, ...], ...]
    """Name, and shape in the whole model, of each of them: `("lm_head.weight", 151936, 1024)`."""
    convert: Mapping[str, Convert] = {}
    """What is done with the parts of these names."""


class WeightSlice(NamedTuple):
    """Where a weight of a checkpoint goes, and which part of it goes there."""

    target: Weight
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    part: tuple[slice, ...]
    is_linear: bool
    """Whether a `LinearMethod` created the target, and must fill it."""
    convert: Convert | None = None


def slices_of_weights(
    stored: Iterable[StoredWeight], whole: DecoderConfig, shard: Shard
) -> dict[str, WeightSlice]:
    """Return where each weight of a checkpoint goes, by its name.

    whole: config of the whole model. The targets are the part of it that `shard` keeps.
    """
    slices: dict[str, WeightSlice] = {}
    for target, parts, convert in stored:
        if target is None:
            continue
        own = [shard.slices(name, whole, tuple(shape)) for name, *shape in parts]
        num_rows = [
            len(range(shape[0])[part[0]]) for (_, *shape), part in zip(parts, own, strict=True)
        ]
        targets = target.split(num_rows) if len(parts) > 1 else [target[: num_rows[0]]]
        for (name, *shape), part, rows in zip(parts, own, targets, strict=True):
            is_linear = len(shape) > 1 and not name.endswith(EMBEDDINGS)
            slices[name] = WeightSlice(rows, tuple(shape), part, is_linear, convert.get(name))
    return slices


class Converted:
    """A weight that is converted when it is sliced."""

    def __init__(self, weight: Any, convert: Convert) -> None:
        self._weight, self._convert = weight, convert

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        return self._convert(self._weight[part])


def zeros_if(
    is_there: bool, size: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor | None:
    """Return a vector of zeros, which a checkpoint need not fill, or None."""
    return torch.zeros(size, dtype=dtype, device=device) if is_there else None


def read_model(model: Any, consume: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a `PreTrainedModel`. `consume` empties each before the next.

    Buffers that a checkpoint holds are weights that no training changes.
    """
    stored = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    for name, parameter in (*model.named_parameters(), *buffers):
        yield name, parameter.data
        if consume:
            parameter.data = parameter.data.new_empty(0)


def read_safetensors(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Yield the weights of files. Only the slices that are taken of a weight are read."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tensors.get_slice(name)
