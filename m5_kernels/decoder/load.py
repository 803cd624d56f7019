"""A decoder of a model: its objects chosen by the caller, its weights filled one by one.

A checkpoint whose weights become something else on the way - rounded, or a part of each - is never
there as a whole: it is loaded without weights, which are then read from its files.

A ready model may do what neither its config nor its weights say: it has hooks, or modules of its
own. So the decoder's logits are compared with the model's, for prompts of a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from m5_kernels.kernels.backend import next_power_of_2, twins
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.core.errors import InputError
from milestone_llm.models.checkpoint import locate
from milestone_llm.models.pretrained import has_weights
from milestone_llm.models.shapes import PREFIX
from milestone_llm.models.support import known_logits, relative_error

from .attention import Attention
from .config import DecoderConfig, rope_table
from .decoder import FusedDecoder
from .weights import read_model, read_safetensors

_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.03}
"""How far logits of the same weights may be apart (`relative_error`): the most that was seen is
0.08 in bf16, 0.15 where weights are rounded to eight bits. Another activation in one of two layers
makes 0.12, a hook 0.3 to 2."""


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
        InputError: the decoder does not know the model or one of its weights, or misses one, or
            `model` is the caller's and computes something else.
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
        if model is source:
            check_logits(decoder, model)
    else:
        _read_files(decoder, str(source))
    return decoder


def check_logits(decoder: FusedDecoder, model: PreTrainedModel) -> None:
    """Compare a decoder with the model whose weights it has.

    Raises:
        InputError: it gives other logits.
    """
    is_rounded = not isinstance(decoder.lm_head, torch.Tensor)
    tolerance = 0.2 if is_rounded else _TOLERANCE.get(model.dtype, 2e-3)
    known = known_logits(model)
    prompts = [prompt[: len(decoder.cos_sin)] for prompt, _ in known]
    computed = _logits_of_prompts(decoder, prompts)
    for logits, (_, expected) in zip(computed, known, strict=True):
        error = relative_error(logits.to(expected.device), expected[: len(logits)])
        if not error <= tolerance:
            raise InputError(
                "the fused decoder knows a model's config and weights, and this one computes "
                f"something else: a hook, or a module of its own (relative error {error:.2g})"
            )


def _logits_of_prompts(
    decoder: FusedDecoder, prompts: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Logits of all tokens of each prompt: a step of new requests, with a block of KV each."""
    device, lens = decoder.embedding.device, [len(prompt) for prompt in prompts]
    block_size = next_power_of_2(max(lens))
    caches = decoder.allocate_caches(len(prompts), block_size)

    def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    places = [(seq, position) for seq, num in enumerate(lens) for position in range(num)]
    none = tensor([0] * len(prompts))
    metadata = StepMetadata(
        input_ids=tensor([token for prompt in prompts for token in prompt.tolist()]),
        positions=tensor([position for _, position in places]),
        slot_mapping=tensor([seq * block_size + place for seq, place in places], torch.int64),
        context_lens=tensor(lens),
        query_start_loc=tensor([sum(lens[:seq]) for seq in range(len(lens) + 1)]),
        output_positions=none,
        decode_lens=none,
        block_table=tensor(list(range(len(prompts))))[:, None],
        first_chunk=tensor([0]),
        num_chunks=len(prompts),
    )
    with torch.cuda.device_of(decoder.embedding), twins():
        hidden = decoder.forward(metadata.input_ids, metadata, caches, Attention())
        return decoder.logits(hidden).split(lens)


def _read_files(decoder: FusedDecoder, source: str) -> None:
    """Read the weights of what `source` names, as far as they are kept here."""
    place, _ = locate(source)
    if not Path(place).is_dir():
        if place.startswith(PREFIX):
            decoder.fill_randomly()
            return
        place = snapshot_download(place, allow_patterns=["*.safetensors", "*.json"])
    decoder.load(read_safetensors(Path(place)))
