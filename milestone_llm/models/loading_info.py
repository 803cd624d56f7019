"""Weights that a checkpoint lacks, has twice, in another shape or number format, or without use.

Hugging Face fills a missing weight with random numbers, and passes over a weight that its model
does not know. It warns of both and goes on. Here a missing weight is an error, and so is one that
is passed over and would change what the model computes: a scale, a bias, a further layer. A warning
is for the others, such as a vision tower. Of two weights of one name it takes the last.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from milestone_llm.core.errors import InputError

from .hub_files import safetensors_files

log = logging.getLogger(__name__)

_NUM_NAMES = 5
"""Most weights that a message names; further ones are counted."""

_QUANTIZED = re.compile(
    r"[._](scales?|scale_inv|qweight|qzeros|zeros|zero_points?|g_idx|weight_packed|absmax|blocks)$"
    r"|\.lora_[AB]\b"
)
"""Parts of quantized matrices, and adapters: without them the matrices are others."""
_WHOLE = re.compile(r"BOOL|[IU]\d+")
"""Formats of whole numbers, as safetensors names them."""
_OF_KV = re.compile(r"\.(q|k|v|kv)_scale$|\.[kv]_proj\.output_scale$")
"""For attention in eight bits. Here keys and values have as many bits as the model computes."""


def check_whole(source: str, info: dict[str, Any], model: PreTrainedModel) -> None:
    """Check that a checkpoint had the weights of the model, no fewer and no more.

    Args:
        info: from `from_pretrained(output_loading_info=True)`. Tied weights are not missing.

    Raises:
        InputError: weights are missing, have other shapes, or change what the model computes and
            were not read; the message names them.
    """
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"{source} lacks {len(missing)} weights: {_some(missing)}")
    mismatched = [
        f"{name} is {list(stored)}, not {list(wanted)}"
        for name, stored, wanted in sorted(info["mismatched_keys"])
    ]
    if mismatched:
        raise InputError(
            f"{source} has {len(mismatched)} weights of other shapes than its config says: "
            f"{_some(mismatched)}"
        )
    check_unread(source, info["unexpected_keys"], model)


def check_files(source: str, files: Iterable[Path], config: PretrainedConfig) -> None:
    """Check that weights in safetensors files can be taken as they are.

    Raises:
        InputError: two files have a weight of one name, of which the last would be taken, or a
            matrix is in whole numbers and the config does not say what they mean.
        SafetensorError: a file is damaged.
    """
    is_quantized = getattr(config, "quantization_config", None) is not None
    places: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                if name in places:
                    raise InputError(
                        f"{source} has {name} twice, in {places[name].name} and in {file.name}: "
                        "remove the files that do not belong to it, and name the others in its "
                        "index"
                    )
                places[name] = file
                kind = tensors.get_slice(name).get_dtype()
                if name.endswith(".weight") and _WHOLE.fullmatch(kind) and not is_quantized:
                    raise InputError(
                        f"{source}: {name} is in {kind}, and config.json has no "
                        "quantization_config that says what its numbers mean"
                    )


def check_blocks(source: str, config: PretrainedConfig) -> None:
    """Check that Hugging Face has multiplied weights in fp8 by the scales of their own blocks.

    It divides a matrix evenly by the number of its scales: 192 rows in blocks of 128 are 96 and 96.

    Raises:
        InputError: a matrix ends within a block.
    """
    fields = getattr(config, "quantization_config", None)
    fields = fields if isinstance(fields, dict) or fields is None else fields.to_dict()
    if fields is None or fields.get("quant_method") != "fp8":
        return
    block = fields.get("weight_block_size", (128, 128)) or ()
    for file in safetensors_files(source):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for name in sorted(names):
                weight, scales = tensors.get_slice(name), f"{name}_scale_inv"
                shape = weight.get_shape()[-2:]
                counts = tensors.get_slice(scales).get_shape()[-2:] if scales in names else shape
                is_cut = any(
                    count > 1 and size > part and size % part
                    for size, part, count in zip(shape, block, counts, strict=False)
                )
                if is_cut and weight.get_dtype() == "F8_E4M3":
                    sizes, parts = (" x ".join(map(str, each)) for each in (shape, block))
                    raise InputError(
                        f"{source}: {name} is {sizes}, with scales for blocks of {parts} that "
                        "Hugging Face's modules would cut evenly: M5's fused decoder reads them "
                        'as they are, with quantization="fp8"'
                    )


def check_unread(source: str, names: Iterable[str], model: PreTrainedModel) -> None:
    """Refuse or warn of weights of a checkpoint that the model has no place for.

    Raises:
        InputError: some of them change what the model computes; the message names these.
    """
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    changing: list[str] = []
    harmless: list[str] = []
    for name in sorted(names):
        full = name if name.startswith(prefix) else prefix + name
        is_changing = any(_changes_results(each, modules) for each in (name, full))
        (changing if is_changing else harmless).append(name)
    if changing:
        raise InputError(
            f"{source} has {len(changing)} weights that its config does not ask for, and without "
            f"which the results are others: {_some(changing)}"
        )
    if harmless:
        log.warning(
            "%s has %d weights that the model does not read: %s",
            source,
            len(harmless),
            _some(harmless),
        )


def is_passed_over(name: str, model: PreTrainedModel) -> bool:
    """Return whether Hugging Face passes over a weight of a checkpoint without a word."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*patterns, r"rotary_emb\.inv_freq"))


def _changes_results(name: str, modules: dict[str, torch.nn.Module]) -> bool:
    """Return whether a model without this weight computes something else.

    A bias, a layer: only of modules that the model has. A vision tower has its own.
    """
    if _QUANTIZED.search(name):
        return not _OF_KV.search(name)
    parts = name.split(".")
    for num_parts, part in enumerate(parts):
        layers = modules.get(".".join(parts[:num_parts]))
        if part.isdigit() and isinstance(layers, torch.nn.ModuleList):
            if int(part) >= len(layers):
                return True
            return parts[-1].endswith("bias") and parts[-1] != "masked_bias"  # a mask of old files
    return parts[-1].endswith("bias") and ".".join(parts[:-1]) in modules


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
    return ", ".join(names[:_NUM_NAMES]) + more
