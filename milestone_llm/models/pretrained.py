"""`from_pretrained`, with one clear error for everything that may be wrong with the files.

Hugging Face goes on where weights are missing, or quantized in a way that it does not know; here
that is an error (`loading_info`). Code in a checkpoint is never run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from milestone_llm.core.errors import InputError

from .hub_files import (
    find_file,
    hub_answers,
    hub_reason,
    one_line,
    safetensors_files,
    split_revision,
)
from .loading_info import check_blocks, check_files, check_whole
from .machine import check_memory

LARGE = 2 * 2**30
"""Bytes that take longer than two seconds to read."""
_MODELOPT_CONFIG = "hf_quant_config.json"
"""NVIDIA's ModelOpt writes what it did to the weights here, and not always into config.json."""


def load_whole_model(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the causal language model of a folder or Hugging Face id, if it has every weight.

    Raises:
        InputError: it cannot be loaded, is larger than memory, lacks weights, has weights that
            would be passed over and change the results, or is a folder whose files have a weight
            twice, or in whole numbers; the message names these.
    """
    config = from_pretrained(AutoConfig, source)
    check_text_model(source, config)
    check_quantization(source, config)
    check_fits(source, config, dtype)
    model, info = from_pretrained(
        AutoModelForCausalLM,
        source,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that `info` has them, not only their number
    )
    check_whole(source, info, model)
    if getattr(model.config, "quantization_config", None) is None:  # its weights are plain now
        check_blocks(source, config)
    folder = Path(source).expanduser()
    if any((folder / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        check_files(source, safetensors_files(source), config)
    return model


def check_text_model(source: str, config: PretrainedConfig) -> None:
    """Check that a model generates text from text alone.

    Raises:
        InputError: it takes images or sound, or does something else; the message names its type.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    others = [name for name in ("vision_config", "audio_config") if hasattr(config, name)]
    what = "takes images or sound" if others else "is no causal language model"
    raise InputError(
        f"{source} is of type {config.model_type!r}, which {what}: only models that generate text "
        "from text are served"
    )


def exceeds_host(source: str, dtype: torch.dtype) -> bool:
    """Return whether the weights of a folder or Hugging Face id are larger than this machine's
    memory."""
    try:
        config = from_pretrained(AutoConfig, source)
    except InputError:  # loading will report it
        return False
    try:
        check_fits(source, config, dtype)
    except InputError:
        return True
    return False


def has_bar(files: Iterable[Path]) -> bool:
    """Return whether reading these files takes so long that a bar is shown."""
    return sum(file.stat().st_size for file in files) > LARGE


def check_fits(name: str, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Check that a model is not larger than this machine's memory.

    Raises:
        InputError: it is; the message has both numbers.
    """
    if getattr(config, "quantization_config", None):  # in fewer bits than dtype has
        return
    num_weights = 0
    with contextlib.suppress(Exception), torch.device("meta"):  # loading reports errors
        num_weights = AutoModelForCausalLM.from_config(config).num_parameters()
    what, advice = f"{name} with weights of {dtype}", "take a smaller model or dtype"
    check_memory(num_weights * dtype.itemsize, torch.device("cpu"), what, advice)


def load_empty_model(
    source: str, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Return the model of a folder or Hugging Face id without its weights, see `build_empty_model`.

    Raises:
        InputError: its config cannot be loaded or makes no model, or its weights are quantized in
            an unknown way. If ModelOpt quantized them, the model's config says so.
    """
    config = from_pretrained(AutoConfig, source)
    check_text_model(source, config)
    modelopt = modelopt_fields(source, config)
    if modelopt is None:
        check_quantization(source, config)
    else:  # who reads the weights will refuse what it does not know
        config.quantization_config = modelopt
    try:
        model = build_empty_model(config, dtype, device)
    except Exception as error:  # numbers in a config may be any
        text = f"cannot load {source}: its config makes no model: {one_line(error)}"
        raise InputError(text) from error
    with contextlib.suppress(InputError):  # most models have one, but not all
        model.generation_config = from_pretrained(GenerationConfig, source)
    return model


def build_empty_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Return a model with modules, dtype and device, whose parameters and buffers have no
    elements."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                empty = torch.empty(0, dtype=tensor.dtype, device=device)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                setattr(module, name, torch.nn.Parameter(empty, False) if is_parameter else empty)
    return model


def has_weights(model: PreTrainedModel) -> bool:
    """Return whether a model has its weights, and is not an empty one."""
    return next(model.parameters()).numel() > 0


def check_quantization(source: str, config: PretrainedConfig) -> None:
    """Check that weights in fewer bits, if a checkpoint has such, are of a kind that can be read.

    Hugging Face reads the weights of other kinds as if they were plain numbers.

    Raises:
        InputError: the kind is not known; the message names it.
    """
    if modelopt := modelopt_fields(source, config):
        raise InputError(
            f"{source} is quantized to {modelopt['quant_algo']} by ModelOpt: of its kinds, M5 "
            'reads FP8, with quantization="fp8"'
        )
    for part in (config, getattr(config, "text_config", None)):
        quantization = getattr(part, "quantization_config", None)
        if quantization is None:
            continue
        fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
        method = fields.get("quant_method")
        with quiet_transformers():
            if method is None or not AutoHfQuantizer.supports_quant_method(fields):
                raise InputError(f"{source} is quantized, and quant_method {method!r} is not known")


def modelopt_fields(source: str, config: PretrainedConfig) -> dict[str, Any] | None:
    """Return what ModelOpt did to the weights, with a `quant_method` and a `quant_algo`; None if
    it did nothing to them."""
    fields = getattr(config, "quantization_config", None)
    if fields is None:
        file = None
        with contextlib.suppress(OSError):  # most repositories have no such file
            is_offline = Path(source).expanduser().is_dir() or not hub_answers()
            file = find_file(source, _MODELOPT_CONFIG, is_offline)
        if file is None:
            return None
        try:
            fields = {**json.loads(file.read_bytes())["quantization"], "quant_method": "modelopt"}
        except (KeyError, TypeError, ValueError):
            fields = {"quant_method": "modelopt", "quant_algo": "an unknown form"}
        if fields.get("quant_algo") is None:  # only keys and values are to be quantized
            return None
    is_modelopt = isinstance(fields, dict) and fields.get("quant_method") == "modelopt"
    return {"quant_algo": None, **fields} if is_modelopt else None


def from_pretrained(auto_class: Any, source: str, **options: Any) -> Any:
    """Call `auto_class.from_pretrained`, with the network only if `source` is not a local folder.

    Raises:
        InputError: one line with the folder or id, the file if one is damaged, and the reason.
    """
    folder = Path(source).expanduser()
    is_local = folder.is_dir()
    if folder.exists() and not is_local:
        raise InputError(f"{source} is no folder")
    if auto_class is AutoConfig and (folder / ADAPTER_CONFIG_NAME).is_file():
        raise InputError(  # transformers would load it or not, which depends on what is installed
            f"{source} holds an adapter ({ADAPTER_CONFIG_NAME}): merge it into its model (peft's "
            "merge_and_unload), and give the folder of the result"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if auto_class is AutoConfig and ggufs and not (folder / "config.json").exists():
        raise InputError(
            f"{source} has no config.json: give its GGUF file as the model, {ggufs[0]}"
        )
    if damage := _damage_of(folder / "generation_config.json"):  # transformers would ignore it
        raise InputError(
            f"cannot load the folder {source}: {damage}, and has tokens that end a text"
        )
    try:
        with quiet_transformers(
            progress_bars=not is_local or has_bar(folder.glob("*.safetensors"))
        ):
            repository, revision = (str(folder), None) if is_local else split_revision(source)
            return auto_class.from_pretrained(
                repository,
                revision=revision or "main",
                local_files_only=is_local or not hub_answers(),
                trust_remote_code=False,
                **options,
            )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # readers of a dozen formats may raise anything
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{source} wants code of its own to be run, which never happens here: there is no "
                f"option for it. Transformers says: {one_line(error)}"
            ) from error
        if is_local:
            damaged = _damaged_file(folder)
            message = f"cannot load the folder {source}: {damaged or one_line(error)}"
        else:
            message = (
                f"cannot load {source!r} from the Hugging Face hub: {hub_reason(error, source)} "
                "Give a local folder or a .gguf file instead, or the default 'smollm2-135m'"
            )
        raise InputError(message) from error


@contextlib.contextmanager
def quiet_transformers(progress_bars: bool = False) -> Iterator[None]:
    """Switch off log lines of transformers inside the block, and progress bars unless wanted."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not progress_bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars and not progress_bars:
            transformers_logging.enable_progress_bar()


def _damaged_file(folder: Path) -> str | None:
    """Return the first file of a checkpoint that cannot be read, and why; None if all can."""
    return next(filter(None, map(_damage_of, sorted(folder.iterdir()))), None)


def _damage_of(file: Path) -> str | None:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                pass
        elif file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix in (".bin", ".pt", ".pth"):
            torch.load(file, map_location="meta", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception as error:
        return f"the file {file.name} is damaged ({one_line(error)})"
    return None
