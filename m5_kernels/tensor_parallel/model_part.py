"""What one rank needs of a model that is cut over several GPUs, and no weight more."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from milestone_llm.models.checkpoint import locate
from milestone_llm.models.pretrained import build_hollow_model, is_hollow
from milestone_llm.models.shapes import PREFIX

from .decoder import FusedDecoder
from .decoder_config import DecoderConfig, rope_table
from .decoder_weights import read_model, read_safetensors
from .parallel import Shard


def model_part(whole: PreTrainedModel, shard: Shard, device: torch.device) -> PreTrainedModel:
    """Config and modules, without weights, of a rank's part: as many heads as it has, and so on.

    Raises:
        ValueError: the decoder does not know the model, or it cannot be cut into such parts.
    """
    part = shard.cut(DecoderConfig.from_hf(whole.config))
    config = copy.deepcopy(whole.config)
    config.num_attention_heads = part.num_q_heads
    config.num_key_value_heads = part.num_kv_heads
    config.head_dim = part.head_dim
    model = build_hollow_model(config, whole.dtype, device)
    model.generation_config = whole.generation_config
    return model


def decoder_part(
    whole: PreTrainedModel,
    source: str | None,
    shard: Shard,
    device: torch.device,
    max_positions: int,
    max_num_seqs: int,
) -> FusedDecoder:
    """The fused decoder with a rank's part of the weights.

    Args:
        whole: with its weights, or a hollow model of what `source` names.
        max_positions, max_num_seqs: as `FusedDecoder` takes them.
    """
    cos_sin = rope_table(whole.config, max_positions)
    config = DecoderConfig.from_hf(whole.config)
    decoder = FusedDecoder(config, cos_sin, whole.dtype, device, shard, max_num_seqs)
    if not is_hollow(whole):
        decoder.load(read_model(whole, consume=False))
        return decoder
    place, _ = locate(str(source))
    if Path(place).is_dir():
        decoder.load(read_safetensors(Path(place)))
    elif place.startswith(PREFIX):
        decoder.fill_randomly()
    else:
        patterns = ["*.safetensors", "*.json"]
        decoder.load(read_safetensors(Path(snapshot_download(place, allow_patterns=patterns))))
    return decoder
