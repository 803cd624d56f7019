"""Load a model by its name: `load_model`.

A name is a Hugging Face id, a local folder, a `.gguf` file, `smollm2-135m` (the default: a real
chat model that comes in a Python package, see `gguf_cache`), `tiny-llama` and similar (random
weights, see `tiny_models`), or `random-qwen3-8b` and similar (random weights in real sizes, see
`shapes`). A ready `PreTrainedModel` is accepted too. The result is always a model in eval mode
without gradients, its tokenizer if it has one, and a name to show.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from milestone_llm.core.errors import InputError

from .chat import render_chat
from .gguf_cache import config_folder, converted_folder, file_key, packaged_gguf, shards_of
from .hub_files import find_file, find_gguf_file, hub_answers
from .pretrained import (
    build_empty_model,
    check_fits,
    exceeds_host,
    from_pretrained,
    load_empty_model,
    load_whole_model,
)
from .shapes import PREFIX, shape_config
from .threads import settle_threads
from .tiny_models import TINY_FAMILIES, build_tiny_model

__all__ = [
    "DEFAULT_MODEL",
    "TINY_FAMILIES",
    "LoadedModel",
    "build_tiny_model",
    "load_model",
    "max_position",
    "render_chat",
    "stop_token_ids",
]

log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: eval mode, no gradients, on its device and in its dtype."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """None: prompts are token ids, and there is no text."""
    name: str

    @property
    def decode(self) -> Callable[[list[int]], str] | None:
        """Returns the text of token ids; None if there is no tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return int(self.model.config.get_text_config().vocab_size)


def load_model(
    model: str | Path | PreTrainedModel,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    weights: bool = True,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Only a Hugging Face id makes a network request.

    Args:
        model: Hugging Face id, also as `org/name@revision`, local folder, `.gguf` file (of the hub:
            `org/name-GGUF:Q4_K_M` or `org/name-GGUF/file.gguf`), "smollm2-135m", "tiny-llama" (or
            another of `TINY_FAMILIES`), or a ready model, which is set to eval mode without
            gradients.
        tokenizer: a ready one, or the folder or id of one; None: the model's own.
        dtype: "float32", "bfloat16", "float16" or a `torch.dtype`. None: float32 on a CPU
            and for tiny models, else bfloat16. A ready model keeps its own, which must be this one.
        device: "cpu", "cuda", "cuda:1". None: CUDA if there is a GPU. A ready model is not moved,
            and must be on this device.
        weights: False for callers that read a named model's weights themselves, in parts: then the
            model has config and modules, and parameters without elements. A tiny model always has
            its weights.

    Raises:
        InputError: the model cannot be loaded, the dtype or device is not known, or a ready model
            has another one; the message says what to do.
    """
    target_dtype = _resolve_dtype(dtype)
    if isinstance(model, PreTrainedModel):
        ready = model
        own_tokenizer = None
        name = Path(model.name_or_path).name or type(model).__name__
        _check_ready(model, target_dtype, None if device is None else _resolve_device(device))
    else:
        target_device = _resolve_device(device)
        if target_dtype is None:
            is_tiny = str(model).startswith("tiny-")  # it is for comparing tokens, not speed
            is_rounded = target_device.type == "cuda" and not is_tiny
            target_dtype = torch.bfloat16 if is_rounded else torch.float32
        source, name = locate(model, weights)
        ready = _build_named(source, target_dtype, target_device, weights)
        if tokenizer is None:
            own_tokenizer = _load_tokenizer(source)
        ready = ready.to(target_device)
        if ready.dtype != target_dtype:
            _cast(ready, target_dtype)
    ready = ready.eval().requires_grad_(False)
    is_random = str(model).startswith(("tiny-", PREFIX))
    if ready is not model and not is_random and ready.device.type == "cpu":
        settle_threads(log.warning)
    if isinstance(tokenizer, (str, Path)):
        own_tokenizer = _load_tokenizer(locate(tokenizer)[0])
        if own_tokenizer is None:
            raise InputError(f"the folder {str(tokenizer)!r} holds no tokenizer")
    elif not hasattr(tokenizer, "decode") and tokenizer is not None:
        raise InputError(f"a tokenizer is a ready one, a folder or an id, not {tokenizer!r}")
    elif tokenizer is not None:
        own_tokenizer = tokenizer
    return LoadedModel(ready, own_tokenizer, name)


def device_of(
    model: str | Path | PreTrainedModel, device: str | torch.device | None
) -> torch.device:
    """Return where a model will be. Arguments and errors are those of `load_model`."""
    return model.device if isinstance(model, PreTrainedModel) else _resolve_device(device)


def is_read_in_parts(
    model: str | Path | PreTrainedModel, dtype: str | None, device: str | None
) -> bool:
    """Return whether a model is too large for the host's memory, so that its weights must go from
    its files onto a GPU part by part. Arguments as `load_model` takes them."""
    if isinstance(model, PreTrainedModel) or _resolve_device(device).type != "cuda":
        return False
    place, _ = locate(model)
    if place.startswith(("tiny-", PREFIX)) and not Path(place).is_dir():
        return False
    return exceeds_host(place, _resolve_dtype(dtype) or torch.bfloat16)


def stop_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens with which the model ends its output (EOS); empty if it has none, or -1.

    Raises:
        InputError: they are no token ids: Hugging Face does not check those of a generation config.
    """
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            ids = list(eos) if isinstance(eos, Iterable) else [eos]
            if not all(type(token) is int for token in ids):
                raise InputError(
                    f"eos_token_id of {type(config).__name__} must be a token id or a list of "
                    f"them, got {eos!r:.200}: correct generation_config.json"
                )
            return frozenset(token for token in ids if token >= 0)
    return frozenset()


def max_position(model: PreTrainedModel) -> int | None:
    """Return the most tokens that the model has positions for; None if its config does not say."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def _resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return _DTYPES[name]


def _resolve_device(device: str | torch.device | None) -> torch.device:
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda" if num_cuda else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f'device must be like "cpu", "cuda" or "cuda:1", got {device!r}') from None
    if resolved.type not in ("cpu", "cuda"):
        raise InputError(f"engines run on a CPU or on CUDA devices, not on {device!s}")
    if resolved.type == "cuda" and (resolved.index or 0) >= num_cuda:
        raise InputError(f"device is {device!s}, but torch sees {num_cuda} CUDA devices")
    return resolved


def _check_ready(
    model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | None
) -> None:
    """Check a ready model. It is not changed, because other engines of its owner may use it.

    Raises:
        InputError: it has another dtype, is on another device, or has no weights.
    """
    if model.device.type == "meta":
        raise InputError(
            'the model is on the device "meta", where weights have no values: load it with them'
        )
    if dtype not in (None, model.dtype):
        raise InputError(
            f"dtype={dtype} is given with a ready model of {model.dtype}, which stays as it is: "
            f"load it with from_pretrained(..., dtype={dtype}), or leave dtype out"
        )
    if device is not None and not (
        device.type == model.device.type
        and (device.type == "cpu" or device.index in (None, model.device.index))
    ):
        raise InputError(
            f"device={str(device)!r} is given with a ready model on {str(model.device)!r}, which "
            f"stays there: move it yourself, model.to({str(device)!r}), or leave device out"
        )


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the dtype of the weights, as `from_pretrained(dtype=...)` does.

    Computed buffers keep theirs: `model.to(dtype)` would also round the RoPE frequencies, and with
    them the positions.
    """
    for weight in model.state_dict(keep_vars=True).values():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype


def _build_named(
    source: str, dtype: torch.dtype, device: torch.device, weights: bool
) -> PreTrainedModel:
    if source.startswith("tiny-") and not Path(source).is_dir():
        return build_tiny_model(source.removeprefix("tiny-"))
    if source.startswith(PREFIX) and not Path(source).is_dir():
        config = shape_config(source.removeprefix(PREFIX))
        if device.type == "cpu":
            check_fits(source, config, dtype)
        if weights:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            if config.model_type == "gpt_oss":
                # Its layers alone are chaotic: where rounding chooses another expert, all that
                # follows is different, and no comparison of logits holds.
                model.get_input_embeddings().weight.data *= 512
            return model
        return build_empty_model(config, dtype, device)
    if weights:
        return load_whole_model(source, dtype=dtype)
    return load_empty_model(source, dtype, device)


def locate(model: str | Path, weights: bool = True) -> tuple[str, str]:
    """Find a named model: its folder, its Hugging Face id, or the name itself if it is random.

    weights: whether the folder of a GGUF file must have the weights, and not only the config.

    Returns:
        The place, and a name to show.

    Raises:
        InputError: there is no such model.
    """
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise InputError(
            "a model or a tokenizer is named by a Hugging Face id, a folder or a .gguf file, "
            f"not by {model!r}"
        )
    text, convert = str(model), converted_folder if weights else config_folder
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{text[:80]!r} names no model and can be no path: {error!s:.80}"
        ) from None
    if path.is_dir():
        return str(path), path.resolve().name
    if text == DEFAULT_MODEL:
        return str(convert(*packaged_gguf())), DEFAULT_MODEL
    if text.startswith(("tiny-", PREFIX)):
        return text, text
    if path.exists() and not (path.suffix == ".gguf" and path.is_file()):
        raise InputError(f"{text} is neither a folder nor a .gguf file")
    if file := _local_gguf(text):
        return str(convert(file, file_key(file))), file.stem
    if text.upper().endswith("-GGUF"):
        raise InputError(
            f"{text} has files of several types: name one by its type, {text}:Q4_K_M, or by its "
            f"name, {text}/file.gguf"
        )
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(text):
        raise InputError(f"there is no file or folder {text}")
    return text, text


def at_revision(model: str | Path | PreTrainedModel, revision: str | None) -> Any:
    """Return the name of a model at a branch, tag or commit of its Hugging Face repository.

    Raises:
        InputError: a revision is given, and the model comes from no repository.
    """
    if revision is None:
        return model
    named = "" if isinstance(model, PreTrainedModel) else str(model)
    is_id = _HUB_ID.fullmatch(named) and "@" not in named and not Path(named).exists()
    if not is_id or named == DEFAULT_MODEL or named.startswith(("tiny-", PREFIX)):
        raise InputError(f"revision={revision!r} is for an id of the hub, not for {model!r:.80}")
    return f"{model}@{revision}"


def find_gguf(model: object) -> tuple[Path, Path] | None:
    """Return a model's GGUF file and a folder with its config; None if it has no such file."""
    if model == DEFAULT_MODEL and not Path(DEFAULT_MODEL).is_dir():
        file, key = packaged_gguf()
        return file, config_folder(file, key)
    if isinstance(model, (str, Path)) and (local := _local_gguf(str(model))):
        return local, config_folder(local, file_key(local))
    return None


def _local_gguf(name: str) -> Path | None:
    """Return the GGUF file of this name, on this machine or downloaded from the hub; the first of a
    model in several files. None: it is no name of such a file."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return shards_of(path)[0]
    return None if path.exists() else find_gguf_file(name)


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or id; None for one that has none."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not any((folder / file).exists() for file in _TOKENIZER_FILES):
            return None
    elif source.startswith(("tiny-", PREFIX)):
        return None
    try:
        return from_pretrained(AutoTokenizer, source)
    except InputError:
        if folder.is_dir() or _has_tokenizer(source):
            raise
    log.warning("%s has no tokenizer: prompts are token ids, and there is no text", source)
    return None


def _has_tokenizer(source: str) -> bool:
    """Return whether a Hugging Face id has a tokenizer's file."""
    is_offline = not hub_answers()
    with contextlib.suppress(OSError):
        return any(find_file(source, file, is_offline) for file in _TOKENIZER_FILES)
    return True  # the hub did not say
