"""Which models an engine may serve: only those that are known to give right tokens.

That is a causal language model whose only state is the keys and values of full or sliding-window
attention, and whose positions mean the same in every batch. Some of this is in the config, and is
read here. The rest is tested with prompts of a few tokens: the logits in a batch must be those of
each prompt alone. For M1, the test is the padded batch that it uses. M2 to M5 put their own
attention into the model; for their test see `flat_probe`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from milestone_llm.core.errors import InputError

from .flat_probe import FEATURES, UnsupportedError, run_flat
from .hf_model import with_attention
from .pretrained import quiet_transformers

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "ntk_alpha")
"""Rotary embeddings whose angles depend only on a token's own position. `dynamic` and `longrope`
also use the longest position in the batch, which may belong to another request."""

LAYER_TYPES = ("full_attention", "sliding_attention")

_KV_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Names of Hugging Face's cache layers that hold keys and values or nothing. They are names because
not every release has all of them."""

_NUM_TOKENS = (11, 6)
"""Tokens of the two test prompts; the first is longer than the window of any tiny model."""

_SMALL_WINDOW = 5
"""Shorter than both prompts."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""How far logits may be from the expected ones, relative to the norm of these, by dtype. For wrong
logits it is about 1."""


def check_flat(model: PreTrainedModel) -> None:
    """Check that flat batches and replaced attention (M2 to M5) give a model's own logits.

    Raises:
        InputError: they do not; the message names the class, the model type and the reason, and
            says so if M1 serves the model.
    """
    try:
        _check_flat(model)
    except InputError as error:
        with contextlib.suppress(InputError):
            check_padded(model)
            error.args = (f"{error}. M1 serves it",)
        raise


def _check_flat(model: PreTrainedModel) -> None:
    with _refusals_name(model):
        _check_config(model)
        if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
            raise UnsupportedError(FEATURES["softcap"])  # some models' code forgets to pass it on
        expected = [_alone(model, prompt) for prompt in _prompts(model)]
        for logits, reference in zip(run_flat(model, _prompts(model)), expected, strict=True):
            _check_equal(logits, reference, "in a flat batch, with the attention replaced")


def known_logits(model: PreTrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return two prompts of a few tokens, each with a model's logits `[num_tokens, vocab_size]`.

    Raises:
        InputError: the model gives no logits.
    """
    with _refusals_name(model):
        return [(prompt, _alone(model, prompt)) for prompt in _prompts(model)]


def check_padded(model: PreTrainedModel) -> None:
    """Check that left padding and `past_key_values` (M1) give a model's own logits.

    Raises:
        InputError: they do not; the message names the class, the model type and the reason.
    """
    with _refusals_name(model):
        _check_config(model)
        _check_padded_batch(model)
        layers = DynamicCache(config=model.config).layers
        window = max((getattr(layer, "sliding_window", 0) for layer in layers), default=0)
        if window >= max(_NUM_TOKENS):  # the test prompts are shorter
            _check_small_window(model, window)


def _check_padded_batch(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError` if a padded batch and a decode step give other logits than alone."""
    prompts = _prompts(model)
    expected = [_alone(model, prompt) for prompt in prompts]
    width = max(_NUM_TOKENS) - 1  # the last tokens are for the decode step
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width + 1).long()
    for row, prompt in enumerate(prompts):
        ids[row, width + 1 - len(prompt) :] = prompt[:-1]
        mask[row, width + 1 - len(prompt) :] = 1
    cache = DynamicCache(config=model.config)
    last = torch.stack([prompt[-1:] for prompt in prompts])
    for step, (input_ids, seen) in enumerate(((ids, mask[:, :-1]), (last, mask))):
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        logits = model(
            input_ids=input_ids.to(model.device),
            attention_mask=seen.to(model.device),
            position_ids=positions.to(model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        for row, reference in enumerate(expected):
            # The reference also had the next token, which changes nothing in a causal model.
            wanted = reference[len(prompts[row]) - 2 + step]
            _check_equal(logits[row, -1:], wanted[None], "in a padded batch with a KV cache")
    if any(not layer.is_initialized for layer in cache.layers):
        raise UnsupportedError("a layer that keeps no keys and values in `past_key_values`")


def _check_small_window(model: PreTrainedModel, window: int) -> None:
    """Raise `UnsupportedError` if layers ignore a window that is longer than the test prompts.

    The test uses the same weights with a shorter window.
    """
    config = model.config.get_text_config(decoder=True)
    twin = with_attention(model, config._attn_implementation)
    twin.config.get_text_config(decoder=True).sliding_window = _SMALL_WINDOW
    try:
        _check_padded_batch(twin)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"a sliding window of {window} that its layers do not keep to as the KV cache does"
        ) from error


@contextlib.contextmanager
def _refusals_name(model: PreTrainedModel) -> Iterator[None]:
    """Turn every exception inside the block into an `InputError` that names the model."""
    name = f"{type(model).__name__} (model type {model.config.model_type})"
    try:
        with torch.inference_mode(), quiet_transformers():
            yield
    except UnsupportedError as error:
        raise InputError(f"{name} cannot be served: it has {error}") from None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # unknown code may raise anything
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        raise InputError(
            f"{name} cannot be served: a try with two prompts raised {reason}"
        ) from error


def _check_config(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError` for unsupported features in the class and the config of a model."""
    config = model.config
    text_config = config.get_text_config(decoder=True)
    classes = {kind.__name__ for kind in type(model).__mro__}
    if classes.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise UnsupportedError("no causal language model's class")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("cross-attention (it is an encoder-decoder)")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind is not None and kind not in ROPE_TYPES:
                raise UnsupportedError(
                    f"a rotary embedding of type {kind!r}, which depends on the longest position "
                    f"in the batch; known are {', '.join(ROPE_TYPES)}"
                )
        if kinds is not None and not all(each.isfinite().all() for each in module.buffers()):
            parameters = getattr(text_config, "rope_parameters", None)
            raise UnsupportedError(f"angles that are no numbers: rope_parameters are {parameters}")
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if unknown := sorted(layer_types.difference(LAYER_TYPES)):
        raise UnsupportedError(f"layers of type {', '.join(unknown)}")
    for layer in DynamicCache(config=config).layers:  # a dummy layer uses the KV of another layer
        if type(layer).__name__ not in _KV_LAYERS:
            raise UnsupportedError(f"other state than keys and values ({type(layer).__name__})")


def _prompts(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return two prompts of ordinary tokens: no EOS, no image placeholder."""
    config = model.config.get_text_config(decoder=True)
    special = {
        token
        for name, token in {**model.config.to_dict(), **config.to_dict()}.items()
        if name.endswith(("token_id", "token_index")) and isinstance(token, int)
    }
    ids = [token for token in range(config.vocab_size) if token not in special]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor(ids)[torch.randint(len(ids), (sum(_NUM_TOKENS),), generator=generator)]
    return list(chosen.split(_NUM_TOKENS))


def _alone(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """Return Hugging Face's logits of all tokens of a prompt alone, `[num_tokens, vocab_size]`."""
    input_ids = prompt[None].to(model.device)
    logits = model(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False
    ).logits
    wanted = (1, len(prompt), model.config.get_text_config(decoder=True).vocab_size)
    if tuple(logits.shape) != wanted:
        raise UnsupportedError(f"logits of shape {list(logits.shape)}, not {list(wanted)}")
    if logits.isnan().all():
        raise UnsupportedError(f"only NaN for logits: its weights are {logits.dtype}")
    return logits[0]


def _check_equal(logits: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raise `UnsupportedError` if logits `[num_tokens, vocab_size]` are not the expected ones."""
    if logits.shape != expected.shape:
        raise UnsupportedError(f"no logits for the tokens asked for by `logits_to_keep` {where}")
    dtype, tolerance = expected.dtype, _TOLERANCE.get(expected.dtype, 0.2)
    expected, logits = expected.double(), logits.double()
    # Entries that a model masks out, with -inf or similar, are ignored. So are its own NaN.
    ordinary = expected.abs() < 1e30
    if not (logits.where(ordinary, 0.0).abs() < 1e30).all():
        raise UnsupportedError(
            f"logits that are no numbers {where}, and alone they are: its weights are {dtype}, "
            "another dtype may do"
        )
    error = relative_error(logits.where(ordinary, 0.0), expected.where(ordinary, 0.0))
    if error > tolerance:
        raise UnsupportedError(f"other logits {where} than alone (relative error {error:.2g})")


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of logits `[num_tokens, vocab_size]` to the expected ones, relative to
    the norm of these, for the median token."""
    difference = (logits.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1).clamp(min=1e-30)).median())
