"""What a GGUF file says and transformers' reader passes over.

That reader takes the shape of a model from the metadata, and the tensors that the model has. Scaled
positions, further tokens that end a text, and tensors without a place change the text as well. Here
they are taken into the model's config, or refused.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from milestone_llm.core.errors import InputError

log = logging.getLogger(__name__)

_END_TOKENS = ("eos", "eot", "eom")
"""llama.cpp ends a text at each: end of sequence, of a turn, of a message."""
_ROPE_TENSOR = re.compile(r"\b(rope_freqs|rope_factors_\w+)\b")
_READ_ELSEWHERE = re.compile(
    _ROPE_TENSOR.pattern + r"|\battn_rot_embd\b"  # the frequencies, in old files
    r"|_(exps|projs)\.|^output\.weight$"  # experts, GPT-2's head: transformers has rules for them
)


_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys that change attention or logits, and the config's names for them."""
_UNKNOWN = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")
"""Such keys that no family has that transformers reads."""
_REQUIRED = {"llama": ("attention.head_count_kv", "attention.layer_norm_rms_epsilon")}
"""Keys without which transformers takes a default, and llama.cpp another or none."""

_DIGIT_BY_DIGIT = (
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
)
_AS_GPT2 = (
    "gpt-2", "phi-2", "olmo", "jais", "mpt", "trillion", "granite-docling", "exaone4", "mellum",
    "gigachat", "a.x-4.0", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "default",
    None,  # old files
)  # fmt: skip
_WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Values of `tokenizer.ggml.pre`, as llama.cpp reads them (`llama_vocab::impl::load`)."""


def value_of(reader: Any, key: str) -> Any:
    """Return the value of a file's key; None if it has no such key."""
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def check_layers(reader: Any) -> None:
    """Check that the file's tensors are of no more layers than it says.

    Raises:
        InputError: there are more, of which transformers would read only the first.
    """
    num_layers = value_of(reader, f"{value_of(reader, 'general.architecture')}.block_count")
    layers = [re.match(r"blk\.(\d+)\.", tensor.name) for tensor in reader.tensors]
    last = max((int(layer[1]) for layer in layers if layer), default=-1)
    if num_layers is not None and last >= num_layers:
        raise InputError(f"block_count is {num_layers}, and there are tensors of layer {last}")


def check_places(reader: Any) -> None:
    """Check that no two of the file's tensors share bytes, as they do in a damaged file.

    Raises:
        InputError: two do.
    """
    places = sorted(
        (file, int(tensor.data_offset), int(tensor.n_bytes), tensor.name)
        for tensor, file in zip(reader.tensors, reader.files, strict=True)
    )
    for (file, start, size, name), (next_file, next_start, _, next_name) in pairwise(places):
        if file == next_file and start + size > next_start:
            raise InputError(f"{name} and {next_name} share bytes")


def complete_config(model: PreTrainedModel, reader: Any) -> None:
    """Put scaled positions and all tokens that end a text into the config of a model that
    transformers has read.

    Raises:
        InputError: the positions are scaled in a way that Hugging Face's models do not compute, or
            the file's attention is not the config's.
    """
    _check_attention(reader, model.config)
    _complete_attention(reader, model.config)
    scaling = rope_scaling(reader, model.config)
    if scaling:
        model.config.rope_parameters = {**model.config.rope_parameters, **scaling}
    ids = model.generation_config.eos_token_id or model.config.eos_token_id or []
    ends = {ids} if isinstance(ids, int) else {*ids}
    ends |= {value_of(reader, f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS}
    known = sorted(end for end in ends if end is not None and 0 <= end < model.config.vocab_size)
    if len(known) > 1:
        model.generation_config.eos_token_id = known


def complete_tokenizer(tokenizer: Any, reader: Any) -> None:
    """Make a tokenizer split text into words as the file says: other words are other tokens.

    transformers splits text of byte-level BPE as GPT-2's does where it does not know better, which
    is right for few models.

    Raises:
        InputError: the file names a way that is known neither here nor to transformers.
    """
    backend = tokenizer.backend_tokenizer
    if value_of(reader, "tokenizer.ggml.model") != "gpt2":
        has_prefix = getattr(backend.pre_tokenizer, "prepend_scheme", "never") != "never"
        if has_prefix and value_of(reader, "tokenizer.ggml.add_space_prefix") == 0:
            raise InputError("tokenizer.ggml.add_space_prefix is false, and transformers adds one")
        return
    kind = value_of(reader, "tokenizer.ggml.pre") or None
    is_as_gpt2 = isinstance(backend.pre_tokenizer, ByteLevel) and backend.pre_tokenizer.use_regex
    if kind in _DIGIT_BY_DIGIT:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    elif is_as_gpt2 and kind not in _AS_GPT2:
        raise InputError(
            f"tokenizer.ggml.pre is {kind!r}: how it splits text into words is not known to "
            f"transformers {transformers.__version__}; a newer one may know it, or take the model "
            "in Hugging Face's format"
        )
    if kind in _WHOLE_WORDS_FIRST:
        backend.model.ignore_merges = True  # a word that is a token is not merged from others
        if value_of(reader, "tokenizer.ggml.add_bos_token") is None:
            tokenizer.add_bos_token = True
            tokenizer.update_post_processor()


def _check_attention(reader: Any, config: PretrainedConfig) -> None:
    architecture = value_of(reader, "general.architecture")
    if value_of(reader, f"{architecture}.attention.causal") not in (None, True):
        raise InputError("attention.causal is false: it is no model that generates text")
    for key in _REQUIRED.get(architecture, ()):
        if value_of(reader, f"{architecture}.{key}") is None:
            raise InputError(f"the file lacks {architecture}.{key}")
    num_rotated = value_of(reader, f"{architecture}.rope.dimension_count")
    if num_rotated is None or not _has_one_rope(config) or hasattr(config, "qk_rope_head_dim"):
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    known = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
    if num_rotated != known:
        text = f"rope.dimension_count is {num_rotated}, and {config.model_type} rotates {known}"
        raise InputError(f"{text} elements of a head")


def _complete_attention(reader: Any, config: PretrainedConfig) -> None:
    """Put windows, caps and scales of a file into a config, which transformers' reader leaves out.

    Raises:
        InputError: the family has no such thing.
    """
    architecture = value_of(reader, "general.architecture")
    layer_types = getattr(config, "layer_types", None)
    fields = {key: value_of(reader, f"{architecture}.{key}") for key in (*_FIELDS, *_UNKNOWN)}
    window = fields["attention.sliding_window"] or 0
    if layer_types is not None or window >= config.max_position_embeddings:
        del fields["attention.sliding_window"]  # `layer_types` has the layers with a window
    for key, value in fields.items():
        name = _FIELDS.get(key, "")
        if value and hasattr(config, name):
            setattr(config, name, value)
        elif value:
            raise InputError(f"{key} is {value}, and {config.model_type} has no such thing here")
    pattern = value_of(reader, f"{architecture}.attention.sliding_window_pattern")
    if pattern is not None and layer_types is not None:
        if not isinstance(pattern, list):  # every so many layers, one has no window
            pattern = [(layer + 1) % pattern for layer in range(len(layer_types))]
        kinds = ("full_attention", "sliding_attention")
        config.layer_types = [kinds[bool(each)] for each in pattern[: len(layer_types)]]
    theta = value_of(reader, f"{architecture}.rope.freq_base_swa")
    if theta is not None and not _has_one_rope(config):
        config.rope_parameters["sliding_attention"]["rope_theta"] = theta
    if hasattr(config, "query_pre_attn_scalar"):  # no key has it: llama.cpp knows the largest Gemma
        is_27b = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}.get(architecture)
        mean_dim = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = mean_dim if is_27b else config.head_dim


def check_tensors(model: PreTrainedModel, reader: Any) -> None:
    """Check that transformers' reader had a place for all tensors of a file.

    Raises:
        InputError: it had none for a bias, a scale, or a tensor of a layer. Others are warned of.
    """
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = value_of(reader, "general.architecture")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(model.config.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    names = [tensor.name for tensor in reader.tensors]
    unread = [name for name in names if name not in places and not _READ_ELSEWHERE.search(name)]
    changing = [name for name in unread if re.search(r"^blk\.|\.bias$|scale$", name)]
    if changing:
        raise InputError(
            f"{model.config.model_type} has no place for {len(changing)} tensors, without which "
            f"the results are others: {', '.join(changing[:5])}"
        )
    if unread:
        log.warning("the GGUF file has tensors that are not read: %s", ", ".join(unread[:5]))


def rope_scaling(reader: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return how a file scales positions, as entries of `rope_parameters`; empty if it does not.

    Raises:
        InputError: it does so in a way that is not known here.
    """
    architecture = value_of(reader, "general.architecture")
    if architecture == "gpt-oss":  # transformers reads it
        return {}
    by_keys = _scaling_of_keys(reader, architecture, config)
    by_tensors = _scaling_of_tensors(reader, config)
    if by_keys and by_tensors:
        raise InputError("rope.scaling and rope_freqs both scale positions, which is not known")
    return by_keys or by_tensors


def _scaling_of_keys(reader: Any, architecture: str, config: PretrainedConfig) -> dict[str, Any]:
    start = f"{architecture}.rope.scaling."
    fields = {
        key.removeprefix(start): value_of(reader, key)
        for key in reader.fields
        if key.startswith(start)
    }
    kind = fields.pop("type", "linear")  # as in llama.cpp
    factor = fields.pop("factor", None) or value_of(reader, f"{architecture}.rope.scale_linear")
    context = fields.pop("original_context_length", None) or config.max_position_embeddings
    fields.pop("finetuned", None)
    if fields.get("attn_factor") == 1:
        del fields["attn_factor"]
    is_off = kind == "none" or (kind == "linear" and factor in (None, 0, 1))
    if is_off and "attn_factor" not in fields:
        return {}
    is_plain = factor is not None and math.isfinite(factor) and factor >= 1
    is_plain &= "attn_factor" not in fields and (kind == "linear" or not fields)
    if kind not in ("linear", "yarn") or not is_plain or not _has_one_rope(config):
        also = f", {', '.join(fields)}" if fields else ""
        raise InputError(
            f"rope.scaling.type {kind!r} (factor {factor}{also}) of {architecture} is not known"
        )
    scaling = {"rope_type": kind, "factor": float(factor)}
    return scaling if kind == "linear" else {**scaling, "original_max_position_embeddings": context}


def _scaling_of_tensors(reader: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return the scaling that gives the file's factors: of Llama 3, or a linear one.

    llama.cpp's converter computes the factors from Llama 3's scaling, and keeps only them.
    """
    tensors = [tensor for tensor in reader.tensors if _ROPE_TENSOR.search(tensor.name)]
    all_factors = [np.array(tensor.data, dtype=np.float64).ravel() for tensor in tensors]
    changing = [factors for factors in all_factors if not np.all(factors == 1)]
    if not changing:
        return {}
    name = tensors[0].name
    if len(tensors) == 1 and "freqs" in name and _has_one_rope(config):
        largest = float(changing[0].max())
        if np.all(changing[0] == largest) and 0 < largest < math.inf:
            return {"rope_type": "linear", "factor": largest}
        for exponent in range(5, 21):
            scaling = {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2**exponent,
            }
            factors = _llama3_factors(config, scaling)
            if factors.shape == changing[0].shape and np.allclose(factors, changing[0], 1e-4, 0):
                return scaling
    raise InputError(f"{name} scales positions otherwise than Llama 3 does, which is not known")


def _llama3_factors(config: PretrainedConfig, scaling: dict[str, Any]) -> np.ndarray:
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = {**config.rope_parameters, **scaling}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    exponents = np.arange(len(frequencies)) / len(frequencies)
    return config.rope_parameters["rope_theta"] ** -exponents / frequencies.double().numpy()


def _has_one_rope(config: PretrainedConfig) -> bool:
    """Return whether a config has one kind of positions for all layers."""
    return "rope_theta" in (getattr(config, "rope_parameters", None) or {})
