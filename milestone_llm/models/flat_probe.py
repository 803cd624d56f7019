"""Test a model as M2 to M5 use it: flat batches, and an attention function of ours.

Everything except attention must process one token at a time. If so, tokens of two prompts may come
in any order, and each still gets the same logits as in its own prompt:

    prompts    a0 a1 a2 a3   b0 b1 b2           flat    b1 a3 a0 b2 a1 b0 a2
    positions   0  1  2  3    0  1  2                    1  3  0  2  1  0  2

The logits differ if a layer uses neighbours in memory (a convolution, a recurrence), counts
positions itself, or does not attend through `AttentionInterface`. A few tokens cannot test a window
of thousands. But the KV cache of Hugging Face has the window's size, and attention must get the
same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .attend import attend
from .hf_model import with_attention
from .kv_shape import KVShape

NAME = "probed_attention"

FEATURES = {
    "softcap": "soft-capping of attention logits",
    "position_bias": "a bias on attention logits by distance (such as ALiBi)",
}
"""Keywords of an attention function that change its result, and what they mean."""

HARMLESS = {"scaling", "dropout", "sliding_window", "is_causal", "position_ids", "logits_to_keep"}
"""Keywords that may have any value: we set them and our function follows them, or they do not
change attention."""


class UnsupportedError(Exception):
    """A feature that is not supported; the message fits after "the model has ..."."""


@dataclass
class Probe:
    """The batch, for the attention function, and what the function records about the model."""

    owners: torch.Tensor
    """Prompt index of each token, `[num_tokens]`."""
    positions: torch.Tensor
    """Position of each token in its prompt, `[num_tokens]`."""
    kv_shape: KVShape
    num_calls: dict[int, int] = field(default_factory=dict)
    """Number of calls for each layer, by `layer_idx`."""
    windows: list[int | None] = field(default_factory=list)
    """`sliding_window` of each call."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute causal attention of each token to the tokens of its own prompt."""
        distance = self.positions[:, None] - self.positions[None]
        is_visible = (self.owners[:, None] == self.owners[None]) & (distance >= 0)
        if self.windows[-1] is not None:
            is_visible &= distance < self.windows[-1]
        output = attend(
            query, key, value, is_visible, scaling=scaling, enable_gqa=True, sinks=sinks
        )
        return output.transpose(1, 2)


def run_flat(model: PreTrainedModel, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return logits `[num_tokens, vocab_size]` of each prompt, computed in one flat, shuffled
    batch.

    Raises:
        UnsupportedError: the model does not use attention as M2 to M5 need it.
    """
    model = with_attention(model, NAME)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    order = torch.randperm(int(lengths.sum()), generator=torch.Generator().manual_seed(1))
    owners = torch.repeat_interleave(torch.arange(len(prompts)), lengths)[order].to(model.device)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[order]
    positions = positions.to(model.device)
    probe = Probe(owners, positions, _kv_shape(model))
    output = model(
        input_ids=torch.cat(prompts)[order][None].to(model.device),
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=order.argsort().to(model.device),
        attention_metadata=probe,
    )
    _check_calls(probe, DynamicCache(config=model.config).layers)
    return list(output.logits[0].split(lengths.tolist()))


def _kv_shape(model: PreTrainedModel) -> KVShape:
    try:
        return KVShape.of(model)
    except Exception:  # the config lacks these fields, or has several values for one
        raise UnsupportedError("not one shape of keys and values for all layers") from None


def probed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_metadata: Probe | None = None,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Record the arguments of a call, and compute attention. This is the tested attention function.

    Args:
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`; `value` likewise, with its `value_dim`.
        s_aux: sinks, `[num_heads]`; see `attend`.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no attention weights.
    """
    probe, shape = attention_metadata, tuple(key.shape)
    if probe is None:
        raise UnsupportedError("layers that hand no keywords on to their attention")
    for name, setting in keywords.items():
        is_off = setting is None or (isinstance(setting, (bool, int, float)) and not setting)
        if name not in HARMLESS and not is_off:
            raise UnsupportedError(FEATURES.get(name, f"attention with {name}={setting!r}"))
    window = keywords.get("sliding_window")
    if window is not None and window < 1:
        raise UnsupportedError(f"a sliding window of {window}")
    kv, num_tokens = probe.kv_shape, len(probe.owners)
    wanted = [(1, kv.num_kv_heads, num_tokens, dim) for dim in (kv.head_dim, kv.value_dim)]
    if [shape, tuple(value.shape)] != wanted or query.shape[-1] != kv.head_dim:
        keys, values = map(list, wanted)
        raise UnsupportedError(
            f"keys and values of shapes {list(shape)} and {list(value.shape)} where its config "
            f"promises {keys} and {values}"
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedError("attention modules that do not know their layer's number")
    probe.num_calls[layer] = probe.num_calls.get(layer, 0) + 1
    probe.windows.append(window)
    return probe.attend(query, key, value, keywords["scaling"], s_aux), None


def _check_calls(probe: Probe, cache_layers: list[CacheLayerMixin]) -> None:
    """Check that each layer attended exactly once, with the window of its KV cache."""
    if not probe.num_calls:
        raise UnsupportedError("attention that cannot be replaced through AttentionInterface")
    num_layers = probe.kv_shape.num_layers
    if probe.num_calls != dict.fromkeys(range(num_layers), 1):
        raise UnsupportedError(
            f"attention that is not called once in each of its {num_layers} layers, but so often "
            f"by layer: {probe.num_calls}"
        )
    for layer, window in zip(probe.num_calls, probe.windows, strict=True):
        kept = getattr(cache_layers[layer], "sliding_window", None) if cache_layers else None
        if kept not in (None, window):
            raise UnsupportedError(f"a sliding window of {kept} that attention is not told of")


AttentionInterface.register(NAME, probed_attention)
