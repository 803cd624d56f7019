"""Processes forked from one that has imported the modules that tests need.

A fresh Python spends five seconds of a core on torch and transformers. Each of pytest's workers
spends them only once, in the background, when a test first asks for such a process.
"""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PRELOAD = [
    "m1_single.engine",
    "m2_batching.engine",
    "m3_paged.engine",
    "m4_prefix_chunked.engine",
    "m5_kernels.engine",
    "milestone_llm.lab.demo.command",
    "milestone_llm.lab.plots.timeline",
    "milestone_llm.models.tiny_models",
    "milestone_llm.serving.engine.loop",
    "milestone_llm.serving.server",
    "matplotlib.backends.backend_agg",
    "transformers.models.llama.modeling_llama",
    "helpers.rank_programs",
    "helpers.servers",
]

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "tests"),  # sys.path is not inherited by the importing process
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "80",
    "MPLBACKEND": "agg",
}
"""Environment that libraries read when they are imported."""


@functools.cache
def start_importing() -> Any:
    """Start the process from which others are forked. Returns an object that makes them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def process(function: Callable[..., Any], *arguments: Any, daemon: bool = False) -> Any:
    """Return a `multiprocessing.Process`, not yet started. It has imported all of `PRELOAD`."""
    target = functools.partial(_without_garbage, function)
    return start_importing().Process(target=target, args=arguments, daemon=daemon)


def _without_garbage(function: Callable[..., Any], *arguments: Any) -> Any:
    gc.freeze()  # or each collection would scan all imported modules, and copy their pages
    return function(*arguments)


def run(function: Callable[..., Any], *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Call a function in a process. Returns the output of the process and its children as text."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        child = process(_captured, files, function, arguments)
        child.start()
        child.join()
        out, err = (file.read_text(encoding="utf-8") for file in files)
    return subprocess.CompletedProcess(arguments, child.exitcode, out, err)


def run_python(*words: str | Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS...` in the project's folder, or in a copy of it."""
    return run(_become, [str(word) for word in words], root)


def _captured(files: list[Path], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
    )
    sys.exit(function(*arguments))


def _become(words: list[str], root: Path) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    docs_commands = importlib.import_module("docs_commands")
    docs_commands.become(words, {}, root, 1, 2)
