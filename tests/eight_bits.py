"""Models whose matrices are what eight bits make of them, for tests of engines that round."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from milestone_llm.models.tiny_models import build_tiny_model


def with_biases(family: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model whose biases are no zeros."""
    model = build_tiny_model(family, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.linspace(-0.5, 0.5, len(parameter))
    return model


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose matrices are what eight bits make of them, by arithmetic alone."""
    model = copy.deepcopy(model)
    head = model.lm_head.weight.data.clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(weight.dtype)
            scale[scale == 0] = 1  # the row of a padding token
            module.weight.data = (weight.float() / scale.float()).round().to(weight.dtype) * scale
    return model
