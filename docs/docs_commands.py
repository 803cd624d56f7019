"""Run commands of the documentation as a reader would, and compare pictures.

A fresh Python takes seconds to import torch and transformers. To make a check of all pages quick,
they are imported here once, and each command runs in a fork (on Linux; elsewhere, and with settings
such as TRITON_INTERPRET=1 before it, in a new process).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ENVIRONMENT = {
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "PYTHONIOENCODING": "utf-8",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
}
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)")
_PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "matplotlib.figure",
    # not a package's root: those import their modules on first use
    "milestone_llm.frontend.engine",
)


def split_environment(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate `NAME=value` words from the command after them."""
    settings = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        settings[match[1]] = match[2]
        words = words[1:]
    return settings, words


def check_exists(words: list[str], root: Path) -> None:
    """Check that a command runs an existing module or script.

    Raises:
        ValueError: there is none.
    """
    _, words = split_environment(words)
    if words[:2] == ["python", "-m"]:
        try:
            is_there = importlib.util.find_spec(words[2]) is not None
        except ModuleNotFoundError:
            is_there = False
    else:
        is_there = words[0] == "python" and (root / words[1]).is_file()
    if not is_there:
        raise ValueError(f"there is no command `{' '.join(words)}`")


def output_of(words: list[str], root: Path) -> str:
    """Return what a command prints on standard output.

    Raises:
        RuntimeError: its exit status is not 0; the message has what it printed.
    """
    settings, words = split_environment(words)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if sys.platform == "linux" and not settings:  # imports read them
            os.environ.update(ENVIRONMENT)
            for module in _PRELOADED:
                importlib.import_module(module)
            child = os.fork()
            if child == 0:
                become(words[1:], settings, root, out.fileno(), err.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            command = [sys.executable, *words[1:]]
            env = {**os.environ, **ENVIRONMENT, **settings}
            status = subprocess.run(command, cwd=root, env=env, stdout=out, stderr=err).returncode
        out.seek(0)
        err.seek(0)
        text = out.read().decode("utf-8")
        if status != 0:
            complaint = f"{text[-2000:]}\n{err.read().decode('utf-8')[-2000:]}"
            raise RuntimeError(f"`{' '.join(words)}` ended with {status}:\n{complaint}")
    return text


def become(
    arguments: list[str], settings: dict[str, str], root: Path, stdout: int, stderr: int
) -> None:
    """Turn this forked process into `python ARGUMENTS`. Does not return."""
    status = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
        os.environ.update(settings)
        os.chdir(root)
        is_module = arguments[0] == "-m"
        sys.argv = arguments[1:] if is_module else arguments
        sys.path[0] = str(root) if is_module else str((root / arguments[0]).parent)
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def look_alike(one: Path, other: Path) -> bool:
    """Return whether two pictures have the same size and nearly the same pixels.

    Each version of FreeType draws fonts a little differently.
    """
    from matplotlib.image import imread

    pixels, other_pixels = imread(one), imread(other)
    return pixels.shape == other_pixels.shape and bool(abs(pixels - other_pixels).mean() < 0.01)
