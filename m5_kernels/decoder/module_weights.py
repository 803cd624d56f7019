"""Weights of a checkpoint's files, with the names and shapes that transformers' modules have.

A module may have one weight where files have several, those of a layer's experts for one. What
belongs together is in transformers' own tables, as are names that have changed:

    model.layers.0.mlp.experts.0.gate_proj.weight   \\
    model.layers.0.mlp.experts.0.up_proj.weight      model.layers.0.mlp.experts.gate_up_proj
    model.layers.0.mlp.experts.1.gate_proj.weight   /
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from milestone_llm.core.errors import InputError


class ModuleWeights:
    """Reads weights, and merges those of which a module makes one. Then the host's memory has them
    twice.

    Args:
        model: of Hugging Face; it needs no weights.
        names: of all weights of the files.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        known = get_model_conversion_mapping(model)
        converters = [each for each in known if isinstance(each, WeightConverter)]
        renamings = [each for each in known if isinstance(each, WeightRenaming)]
        self._converters = {
            pattern: each for each in converters for pattern in each.source_patterns
        }
        self._targets: dict[str, tuple[str, str | None]] = {
            name: rename_source_key(name, renamings, converters) for name in names
        }
        """The name of a module's weight, and the pattern of a converter if it is a part of it."""

    @property
    def names(self) -> set[str]:
        """What modules call the weights."""
        return {target for target, _ in self._targets.values()}

    def read(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights of the files as the modules have them."""
        num_parts: dict[str, int] = defaultdict(int)
        for target, _ in self._targets.values():
            num_parts[target] += 1
        waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, weight in weights:
            target, pattern = self._targets[name]
            if pattern is None:
                yield target, weight
                continue
            waiting[target][name] = weight[:]
            if len(waiting[target]) == num_parts[target]:
                yield from self._merged(target, waiting.pop(target))

    def _merged(
        self, target: str, parts: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        patterns = {name: self._targets[name][1] for name in sorted(parts, key=dot_natural_key)}
        converter = copy.deepcopy(self._converters[next(iter(patterns.values()))])
        for name, pattern in patterns.items():
            converter.add_tensor(target, name, pattern, parts.pop(name))
        try:
            merged = converter.convert(target, model=self._model, config=self._model.config)
        except (RuntimeError, TypeError) as error:  # one is missing, or has another shape
            raise InputError(f"weights of {target} do not fit together ({error})") from error
        yield from merged.items()
