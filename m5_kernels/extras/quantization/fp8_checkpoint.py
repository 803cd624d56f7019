"""Checkpoints whose weights are in e4m3 already, with scales as others store them.

    up_proj.weight             e4m3 [out, in]
    up_proj.weight_scale       one number, or one for each row         compressed-tensors, ModelOpt
    up_proj.weight_scale_inv   one for each block, mostly 128 x 128    Hugging Face, DeepSeek
    up_proj.input_scale        of activations; not used, since each token gets a scale of its own

A weight is multiplied by its scales, and rounded again with one scale for a merged matrix. Numbers
that had this scale already do not change.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from milestone_llm.core.errors import InputError
from milestone_llm.models.checkpoint import locate
from milestone_llm.models.hub_files import safetensors_files

log = logging.getLogger(__name__)

SCALES = (".weight_scale", ".weight_scale_inv")
UNUSED = (".input_scale", ".activation_scale")
"""Scales of activations that were measured when the checkpoint was made."""
EXACT = ("F64", "F32", "BF16", "F16")
"""Numbers that need no scale."""
_OF_LAYER = re.compile(r"\.\d+\..*\.weight$")
"""Weights of a layer. The embedding and the LM head are not rounded."""
FORMATS = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors that store a weight in one byte."""


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """A weight of a checkpoint, which is multiplied by its scales when it is sliced.

    weight: slices of it are e4m3. scale: `[1, 1]`, or with one number for each `block`, of so many
    rows and columns.
    """

    weight: Any
    scale: torch.Tensor
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        """Return the shape of the weight."""
        return list(self.weight.get_shape())

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (
            torch.arange(size)[own] // length
            for size, own, length in zip(self.get_shape(), part, self.block, strict=True)
        )
        return self.weight[part].float() * self.scale[rows[:, None], columns]


@dataclass(frozen=True, eq=False)
class StoredScales:
    """The scales of a checkpoint, by the names of its modules."""

    source: str
    scales: dict[str, torch.Tensor]
    block: tuple[int, int] | None
    """Rows and columns for which there is one number; None: rows, or whole matrices."""

    def joined(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights of the checkpoint without its scales, each multiplied by its own.

        Raises:
            InputError: a weight in few bits has no scale, or a scale no such weight.
        """
        for name, weight in weights:
            module, _, kind = name.rpartition(".")
            if f".{kind}" in SCALES + UNUSED:
                continue
            scale, dtype = self.scales.get(module), weight.get_dtype()
            if kind != "weight" or (scale is None and dtype in EXACT):
                yield name, weight
            elif scale is None or dtype != "F8_E4M3":
                has = "no scale" if scale is None else "a scale"
                raise InputError(f"{self.source}: {name} is in {dtype} and has {has}")
            else:
                yield name, self._scaled(name, weight, scale)

    def _scaled(self, name: str, weight: Any, scale: torch.Tensor) -> ScaledWeight:
        out_size, in_size = weight.get_shape()
        kinds = {(1, 1): (out_size, in_size), (out_size, 1): (1, in_size)}
        if self.block is not None:
            rows, columns = self.block
            kinds[-(-out_size // rows), -(-in_size // columns)] = self.block
        shape = tuple(scale.shape)
        shape = shape if len(shape) == 2 else (scale.numel(), 1)
        if shape not in kinds:
            raise InputError(
                f"{self.source}: {name} is {out_size} x {in_size}, with scales {list(scale.shape)}"
            )
        return ScaledWeight(weight, scale.float().view(shape), kinds[shape])


def take_scales(source: object, model: PreTrainedModel) -> StoredScales | None:
    """Return the scales of a checkpoint in e4m3; None if it is not quantized.

    model: without weights. Its config then no longer says that it is quantized: it gets weights
    that are multiplied by their scales.

    Raises:
        InputError: the checkpoint is quantized in another way, or a file is damaged.
    """
    fields = getattr(model.config, "quantization_config", None)
    if isinstance(source, PreTrainedModel) or fields is None:
        return None
    block = block_of(str(source), fields if isinstance(fields, dict) else fields.to_dict())
    place, _ = locate(str(source))
    scales: dict[str, torch.Tensor] = {}
    matrices: set[str] = set()
    for file in safetensors_files(place):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in filter(_OF_LAYER.search, tensors.keys()):
                    if len(tensors.get_slice(name).get_shape()) == 2:
                        matrices.add(name.removesuffix(".weight"))
                for name in filter(lambda name: name.endswith(SCALES), tensors.keys()):
                    module, scale = name.rpartition(".")[0], tensors.get_tensor(name)
                    if module in scales:
                        raise InputError(f"{source} has two kinds of scales for {module}")
                    if not scale.is_floating_point():
                        raise InputError(f"{source}: {name} is in {scale.dtype}, no scale is")
                    scales[module] = scale
        except SafetensorError as error:
            raise InputError(f"cannot load {source}: {file.name} is damaged ({error})") from error
    del model.config.quantization_config
    exact = matrices - scales.keys()
    also = f"; of those that it has exactly, so many, too: {len(exact)}" if exact else ""
    text = "%s has weights in e4m3: they are rounded again, to one scale a matrix%s"
    log.warning(text, source, also)
    return StoredScales(str(source), scales, block)


def block_of(source: str, fields: dict[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns for which a checkpoint has one scale; None for rows or matrices.

    fields: `quantization_config` of its config.json, or what ModelOpt has in its own file.

    Raises:
        InputError: the weights are not in e4m3 with such scales; the message names what they are.
    """
    method = found = str(fields.get("quant_method"))
    sizes: list[Any] = []
    is_known = False
    if method == "fp8":
        sizes = [fields.get("weight_block_size", [128, 128])]  # Hugging Face's default
        found += f" {fields.get('fmt', 'e4m3')}"
        is_known = found == "fp8 e4m3"
    elif method == "modelopt":
        found += f" {fields.get('quant_algo')}"
        is_known = found == "modelopt FP8"
    elif method == "compressed-tensors":
        groups = [_part(each, "weights") for each in _part(fields, "config_groups").values()]
        sizes = [each.get("block_structure") for each in groups]
        kinds = {f"{each.get('type')} {each.get('num_bits')}" for each in groups}
        strategies = {str(each.get("strategy")) for each in groups}
        sparsity = _part(fields, "sparsity_config").get("format", "dense")
        found += f" {', '.join(sorted(kinds))}, {fields.get('format')}, {sparsity}"
        is_known = kinds == {"float 8"} and strategies <= {"tensor", "channel", "block"}
        is_known = is_known and fields.get("format") in FORMATS and sparsity == "dense"
        is_known = is_known and not fields.get("transform_config")
    blocks = [each for each in sizes if each is not None]
    if any(each != blocks[0] or not _is_block(each) for each in blocks):
        found, is_known = f"{found}, blocks of {blocks}", False
    if not is_known:
        raise InputError(
            f'{source} is quantized as {found}: of quantized checkpoints, quantization="fp8" '
            "reads those in e4m3 with scales for matrices, rows or blocks"
        )
    return tuple(blocks[0]) if blocks else None


def _part(fields: Any, name: str) -> dict[str, Any]:
    """Return a part of a config; empty if a file has something else in its place."""
    part = fields.get(name) if isinstance(fields, dict) else None
    return part if isinstance(part, dict) else {}


def _is_block(sizes: Any) -> bool:
    is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
    return is_pair and all(type(size) is int and size > 0 for size in sizes)
