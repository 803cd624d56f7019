"""Config and modules of a rank's part of a model, without weights: what KV memory is sized by."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from m5_kernels.decoder.config import DecoderConfig
from milestone_llm.models.pretrained import build_empty_model

from .parallel import Shard


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
