"""A decoder of a model: its objects chosen by the caller, its weights filled one by one.

A checkpoint whose weights become something else on the way - rounded, or a part of each - is never
there as a whole: it is loaded without weights, which are then read from its files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from milestone_llm.models.checkpoint import locate
from milestone_llm.models.pretrained import has_weights
from milestone_llm.models.shapes import PREFIX

from .config import DecoderConfig, rope_table
from .decoder import FusedDecoder
from .weights import read_model, read_safetensors


def load_decoder(
    source: str | PreTrainedModel,
    model: PreTrainedModel,
    max_model_len: int,
    device: torch.device,
    weights: Iterable[tuple[str, Any]] | None = None,
    **parts: Any,
) -> FusedDecoder:
    """The decoder of `model`, with its weights.

    Args:
        source: what `model` was loaded from, or itself. Only what is not the caller's is emptied.
        model: with weights, or without any.
        weights: taken instead of those of `source`, as `FusedDecoder.load` takes them.
        parts: objects, as `FusedDecoder` takes them.

    Raises:
        InputError: the decoder does not know the model or one of its weights, or misses one.
    """
    config = (
        DecoderConfig.of_model(model) if has_weights(model) else DecoderConfig.from_hf(model.config)
    )
    decoder = FusedDecoder(
        config, rope_table(model.config, max_model_len), model.dtype, device, **parts
    )
    if weights is not None:
        decoder.load(weights)
    elif has_weights(model):
        decoder.load(read_model(model, consume=model is not source))
    else:
        _read_files(decoder, str(source))
    return decoder


def _read_files(decoder: FusedDecoder, source: str) -> None:
    """Read the weights of what `source` names, as far as they are kept here."""
    place, _ = locate(source)
    if not Path(place).is_dir():
        if place.startswith(PREFIX):
            decoder.fill_randomly()
            return
        place = snapshot_download(place, allow_patterns=["*.safetensors", "*.json"])
    decoder.load(read_safetensors(Path(place)))
