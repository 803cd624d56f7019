"""Running a Hugging Face model with another attention function, or refusing to."""

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


UNSUPPORTED = {
    "attn_logit_softcapping": "attention logit soft-capping",
    "alibi": "ALiBi position bias",
    "attention_chunk_size": "chunked local attention",
}
"""Config fields, and the feature that each stands for when set."""


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse, by name, what would silently give other tokens.

    Raises:
        ValueError: soft-capping, attention sinks, cross-attention or an own attention class.
    """
    config = model.config.get_text_config()
    found = [feature for name, feature in UNSUPPORTED.items() if getattr(config, name, None)]
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        found.append("attention sinks")
    if getattr(model.config, "is_encoder_decoder", False):
        found.append("cross-attention (encoder-decoder)")
    if not getattr(model, "_supports_attention_backend", False):
        found.append("attention that cannot be replaced through AttentionInterface")
    if found:
        raise ValueError(
            f"{type(model).__name__} needs {', '.join(found)}, which this engine does not support; "
            "m1_single runs it with Hugging Face's own attention"
        )
