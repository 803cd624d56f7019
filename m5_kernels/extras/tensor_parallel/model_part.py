"""What one rank needs of a model that is cut over several GPUs, and no weight more.

Weights are read one by one, and each goes where the decoder wants it before the next is read. So a
model whose weights are rounded is loaded this way on one GPU, too: its checkpoint is never there.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from m5_kernels.decoder.config import DecoderConfig, rope_table
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.parallel import Shard
from m5_kernels.decoder.weights import read_model, read_safetensors
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.config import EngineConfig
from milestone_llm.models.checkpoint import LoadedModel, load_model, locate, max_position
from milestone_llm.models.pretrained import build_empty_model, has_weights
from milestone_llm.models.shapes import PREFIX

from .ranks import Ranks


def load_part(
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | None,
    config: EngineConfig,
    ranks: Ranks | None,
    quantization: str | None,
) -> tuple[LoadedModel, FusedDecoder, int]:
    """This rank's part of a model; without ranks, all of it.

    Args:
        quantization: as `FusedDecoder` takes it.

    Returns:
        Config and modules of the part, without weights; the decoder with its weights; and
        `max_model_len`.

    Raises:
        InputError: the decoder does not know the model, or it cannot be cut into such parts.
    """
    is_ready = isinstance(model, PreTrainedModel)
    device = config.device if ranks is None else None if is_ready else ranks.device
    loaded = load_model(model, tokenizer, config.dtype, device, weights=False)
    whole = part = loaded.model
    if quantization is not None:
        check_quantization(whole.config, quantization)
    shard, device = Shard(), whole.device
    if ranks is not None:
        shard, device = ranks.shard, ranks.device
        part = model_part(whole, shard, device)
    max_model_len = config.resolve_max_model_len(max_position(part))
    is_there = has_weights(whole)
    decoder = FusedDecoder(
        DecoderConfig.of_model(whole) if is_there else DecoderConfig.from_hf(whole.config),
        rope_table(whole.config, max_model_len), whole.dtype, device, shard, config.max_num_seqs,
        quantization,
    )  # fmt: skip
    if is_there:
        decoder.load(read_model(whole, consume=False))
    else:
        fill(decoder, str(model))
    return dataclasses.replace(loaded, model=part), decoder, max_model_len


def fill(decoder: FusedDecoder, source: str) -> None:
    """Read the weights of what `source` names, as far as this rank keeps them."""
    place, _ = locate(source)
    if not Path(place).is_dir():
        if place.startswith(PREFIX):
            decoder.fill_randomly()
            return
        place = snapshot_download(place, allow_patterns=["*.safetensors", "*.json"])
    decoder.load(read_safetensors(Path(place)))


def check_quantization(hf_config: PretrainedConfig, quantization: str) -> None:
    """Refuse a model whose weights cannot be rounded.

    Raises:
        InputError: the decoder does not know the model, or it is quantised already.
    """
    try:
        DecoderConfig.from_hf(hf_config)
    except InputError as error:
        raise InputError(f'quantization="{quantization}": {error}') from None


def model_part(whole: PreTrainedModel, shard: Shard, device: torch.device) -> PreTrainedModel:
    """Config and modules, without weights, of a rank's part: as many heads as it has, and so on.

    Raises:
        InputError: the decoder does not know the model, or it cannot be cut into such parts.
    """
    part = shard.cut(DecoderConfig.from_hf(whole.config))
    config = copy.deepcopy(whole.config)
    config.num_attention_heads = part.num_q_heads
    config.num_key_value_heads = part.num_kv_heads
    config.head_dim = part.head_dim
    model = build_empty_model(config, whole.dtype, device)
    model.generation_config = whole.generation_config
    return model
