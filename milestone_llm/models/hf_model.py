"""Running a Hugging Face model with another attention function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedModel


@contextlib.contextmanager
def attention_function(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a model call the attention function registered under `name`, for a while.

    Before and after, the model is Hugging Face's own again: `model.generate` works on it, and
    engines of several milestones can share it.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
