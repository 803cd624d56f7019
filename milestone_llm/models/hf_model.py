"""A copy of a Hugging Face model with another attention function."""

from __future__ import annotations

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel


def with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a model with the same weights that calls the attention function registered as `name`.

    The name is in the config, so the config is copied, and with it all modules that may read it.
    Leaves without a config (`nn.Linear`), weights and hooks are shared. The model itself does not
    change: its `generate` works at any time, and engines of several milestones can share it.
    """
    shared: dict[int, object] = {}
    for module in model.modules():
        fields = vars(module)
        is_leaf = not module._modules
        if is_leaf and not any(isinstance(value, PretrainedConfig) for value in fields.values()):
            shared[id(module)] = module
        for field in vars(torch.nn.Module()).keys() - {"_modules"}:  # parameters, buffers, hooks
            shared[id(fields[field])] = fields[field]
    twin = copy.deepcopy(model, shared)
    twin.config.get_text_config()._attn_implementation = name
    return twin
