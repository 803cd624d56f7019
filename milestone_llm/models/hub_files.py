"""Files of a checkpoint by their names, in a local folder or on the Hugging Face hub.

`safetensors_files` takes the same files as `from_pretrained`: `model.safetensors`, else the shards
that the index names. Other files of a repository may hold the weights a second time, or old ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import constants as hub_constants
from huggingface_hub import get_session, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from milestone_llm.core.errors import InputError

_HUB_TIMEOUT_S = 5.0
_HUB_GGUF = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?(?::(\w+)|/([\w./-]+\.gguf))")
MAX_CHARACTERS = 1000
"""Most characters that are quoted of an error."""


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


def split_revision(source: str) -> tuple[str, str | None]:
    """Return the parts of `org/name@revision`; None where there is no revision."""
    repository, _, revision = source.partition("@")
    return repository, revision or None


def hub_reason(error: BaseException, source: str) -> str:
    """Return why the hub did not give a repository, and what its user can do about it."""
    repository, revision = split_revision(source)
    address = f"{hub_constants.ENDPOINT}/{repository}"
    log_in = "log in with `hf auth login`, or set HF_TOKEN."
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GatedRepoError):
            if get_token() is None:
                return f"it is gated: accept its terms at {address}, then {log_in}"
            return f"it is gated, and the account of your token has no access: ask at {address}."
        if isinstance(cause, RevisionNotFoundError):
            return f"it has no branch, tag or commit {revision or 'main'!r}."
        if isinstance(cause, RepositoryNotFoundError):
            if get_token() is None:
                return f"there is none of this name, or it is private: then {log_in}"
            return "there is none of this name, or it is private and your token has no access."
        cause = cause.__cause__ or cause.__context__
    return one_line(error)


def one_line(error: BaseException) -> str:
    """Return an error's text in one line, with the name of its class if the text needs it."""
    text = " ".join(str(error).split()) or "no message"
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} ..."
    is_clear = isinstance(error, (OSError, ValueError, ImportError))
    return text if is_clear else f"{type(error).__name__}: {text}"


def find_gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name on the hub stands for, downloaded if need be.

    Args:
        name: `org/name-GGUF:Q4_K_M`, with the type as its files' names have it, or
            `org/name-GGUF/file.gguf`. Of a model in several files, the first; all are downloaded.

    Returns:
        None if the name has neither form.

    Raises:
        InputError: there is no such repository or file.
    """
    match = _HUB_GGUF.fullmatch(name)
    if match is None:
        return None
    repository, revision, kind, file = match.groups()
    patterns = [f"*{kind}.gguf", f"*{kind}-*-of-*.gguf"]
    if file is not None:
        patterns = [re.sub(r"-\d{5}-of-", "-*-of-", file)]
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=patterns,
            local_files_only=not hub_answers(),
        )
    except Exception as error:  # of the hub, or of the network
        source = f"{repository}@{revision}" if revision else repository
        reason = hub_reason(error, source)
        raise InputError(f"cannot load {name!r} from the Hugging Face hub: {reason}") from error
    found = sorted(path for each in patterns for path in Path(folder).rglob(each))
    if not found:
        raise InputError(f"{repository} has no file {' or '.join(patterns)}")
    return found[0]


def find_file(source: str, name: str, local_files_only: bool) -> Path | None:
    """Return the path of a file of a folder or Hugging Face id, which is downloaded if need be.

    local_files_only: take what was downloaded earlier, and ask no network.

    Returns:
        None if there is no such file.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    repository, revision = split_revision(source)
    found = cached_file(
        repository,
        name,
        revision=revision,
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
        reason = hub_reason(error, source)
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
