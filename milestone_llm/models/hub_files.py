"""Files of a checkpoint by their names, in a local folder or on the Hugging Face hub.

`safetensors_files` takes the same files as `from_pretrained`: `model.safetensors`, else the shards
that the index names. Other files of a repository may hold the weights a second time, or old ones.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import constants as hub_constants
from huggingface_hub import get_session
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from milestone_llm.core.errors import InputError

_HUB_TIMEOUT_S = 5.0


def hub_answers() -> bool:
    """Return whether the hub can be reached. If not, `huggingface_hub` would retry for half a
    minute."""
    if hub_constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(hub_constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception:  # of any HTTP library
        return False
    return True


def find_file(source: str, name: str, local_files_only: bool) -> Path | None:
    """Return the path of a file of a folder or Hugging Face id, which is downloaded if need be.

    local_files_only: take what was downloaded earlier, and ask no network.

    Returns:
        None if there is no such file.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    found = cached_file(
        source,
        name,
        local_files_only=local_files_only,
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(found) if found else None


def safetensors_files(source: str) -> list[Path]:
    """Return the files with the weights of a folder or Hugging Face id, sorted by name.

    Raises:
        InputError: there are none, the index is damaged, or a file that it names is missing.
    """
    is_offline = Path(source).expanduser().is_dir() or not hub_answers()
    try:
        single = find_file(source, SAFE_WEIGHTS_NAME, is_offline)
        if single is not None:
            return [single]
        index = find_file(source, SAFE_WEIGHTS_INDEX_NAME, is_offline)
        if index is None:
            names = f"neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
            raise InputError(f"{source} has {names}")
        shards = _shards_of(index)
        found = [find_file(source, name, is_offline) for name in shards]
    except OSError as error:  # of the hub: it is gated, or the network has gone
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise InputError(f"cannot load {source!r} from the Hugging Face hub: {reason}") from error
    files = [file for file in found if file is not None]
    if len(files) < len(shards):
        missing = next(name for name, file in zip(shards, found, strict=True) if file is None)
        raise InputError(f"{source} lacks the file {missing}, which {index.name} names")
    return files


def _shards_of(index: Path) -> list[str]:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        is_list = bool(shards) and all(Path(name).name == name for name in shards)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"the file {index} is damaged ({error})") from None
    if not is_list:
        raise InputError(f"the file {index} is damaged (it names no files of its folder)")
    return sorted(shards)
