"""Common parts of all commands: options with the same name everywhere, and how a command ends.

Nothing here imports an installed library, so that `--help` and a wrong option answer at once. A
program's other imports outside of its body must not either: if a library is missing, the body ends
with a one-line error.
"""

from __future__ import annotations

import argparse
import bdb
import contextlib
import importlib
import io
import json
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from milestone_llm import how_to_install
from milestone_llm.core.errors import InputError
from milestone_llm.gc_control import gc_paused
from milestone_llm.models.threads import let_threads_sleep


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the module docstring unchanged in the help, and the default of every option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS) or action.default == []:
            return action.help  # there is no default worth showing
        return super()._get_help_string(action)


def _number(kind: type[int] | type[float], least: float, complaint: str) -> Callable[[str], Any]:
    """Return an argparse type: a finite number, `least` or above."""

    def parse(text: str) -> int | float:
        number = kind(text)
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is {complaint}")
        return number

    parse.__name__ = kind.__name__  # argparse shows it in errors
    return parse


positive = _number(int, 1, "not above 0")
whole_number = _number(int, 0, "below 0")
above_0 = _number(float, sys.float_info.min, "not above 0")
at_least_0 = _number(float, 0, "no number from 0 on")


def new_file(text: str) -> Path:
    """Check that a path can be written. An argparse type."""
    try:
        try_to_write(Path(text))
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


class Range(argparse.Action):
    """Takes two numbers, the second not smaller than the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the two numbers as a tuple."""
        if values[0] > values[1]:
            parser.error(f"{option_string}: MIN {values[0]} is above MAX {values[1]}")
        setattr(namespace, self.dest, tuple(values))


_COUNT: dict[str, Any] = {"type": positive, "metavar": "N"}
_RANGE: dict[str, Any] = {"action": Range, "nargs": 2, "type": positive, "metavar": ("MIN", "MAX")}
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"default": "smollm2-135m", "help": "HF id, folder, GGUF file or tiny-llama"},
    "max-num-seqs": {**_COUNT, "default": 8, "help": "most rows of a step"},
    "max-num-batched-tokens": {**_COUNT, "help": "most tokens of a step"},
    "max-model-len": {**_COUNT, "help": "most tokens of a request (default: the longest's)"},
    "block-size": {**_COUNT, "default": 16, "help": "tokens of a KV block"},
    "kv-cache-tokens": {**_COUNT, "help": "KV memory (default: too little for all requests)"},
    "preemption": {
        "choices": ("recompute", "swap"),
        "default": "recompute",
        "help": "what becomes of the KV of a preempted request",
    },
    "set": {
        "nargs": "+",
        "default": [],
        "metavar": "FIELD=VALUE",
        "help": "further fields of the engine's EngineConfig",
    },
    "seed": {"type": int, "default": 0, "help": "of everything that is random"},
    "threads": {**_COUNT, "help": "CPU threads (default: what torch takes)"},
    "trace": {
        "metavar": "PATH.jsonl",
        "help": "trace file (or .jsonl.gz); console prints every step",
    },
    "input-len": {**_RANGE, "help": "tokens of a prompt, uniformly drawn"},
    "output-len": {**_RANGE, "help": "tokens of an output, uniformly drawn"},
    "explore": {
        "type": new_file,
        "metavar": "PATH.html",
        "help": "write a page there that replays what the engine did",
    },
    "json": {"type": new_file, "metavar": "PATH", "help": "write everything measured there"},
    "markdown": {"type": new_file, "metavar": "PATH", "help": "write the tables there"},
    "out": {
        "type": Path,
        "default": Path("runs"),
        "metavar": "FOLDER",
        "help": "where pictures go",
    },
}


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add some of `OPTIONS`, with other defaults if given."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    parser.set_defaults(**defaults)


def config_fields(settings: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Turn `block_size=32` into `{"block_size": 32}`. A value that is not JSON is a string.

    Raises:
        InputError: a setting without `=`.
    """
    fields = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"{option} takes FIELD=VALUE, got {setting!r}")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


def try_to_write(path: Path) -> None:
    """Check that a file can be written, before the work whose results it is for.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    if is_new:
        path.unlink(missing_ok=True)  # another rank may have deleted it


def run_command(
    body: Callable[[argparse.Namespace], int | None],
    args: argparse.Namespace,
    before: Callable[[argparse.Namespace], object] = lambda args: None,
) -> int:
    """Run a command's body. An `InputError`, a library that is not installed, Ctrl-C and pdb's
    `quit` end it with one line instead of a traceback.

    Args:
        body: imports the libraries that it needs, so that Ctrl-C is also caught during imports.
        args: its argument; `--threads` is applied here.
        before: checks that can be done before torch is imported.

    Returns:
        The exit status: the body's own, 0 for None, 2 for bad input, 130 for Ctrl-C. Other
        exceptions are not caught.
    """

    def whole() -> int | None:
        before(args)
        with model_libraries(getattr(args, "threads", None)):
            return body(args)

    return ended_in_one_line(whole)


def say_that_it_loads(args: argparse.Namespace) -> None:
    """Name the model that is loaded. Called first: torch alone takes seconds to be imported."""
    from .consoles import log_console

    log_console.print(f"Loading {args.model}.", style="dim", markup=False)


@contextlib.contextmanager
def model_libraries(num_threads: int | None) -> Iterator[None]:
    """Import torch and transformers. Inside the block both are quiet, and torch's threads sleep
    soon.

    Args:
        num_threads: CPU threads, at most one per core; None: torch's default.
    """
    let_threads_sleep()
    with gc_paused():
        from milestone_llm.models.pretrained import quiet_transformers

    if num_threads:
        # the user's choice, for other libraries too
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        import torch

        from milestone_llm.models.machine import usable_cores

        from .consoles import log_console

        if num_threads > (cores := usable_cores()):
            log_console.print(f"--threads {num_threads}: there are {cores} cores, and so threads.")
        torch.set_num_threads(min(num_threads, cores))
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def ended_in_one_line(body: Callable[[], int | None]) -> int:
    """Run a body that needs no model in this process, as `run_command` does. Returns the exit
    status.

    SIGTERM ends the body as an exception does, so that programs that it started are ended too.
    """
    for stream in (sys.stdout, sys.stderr):
        # a character that an ASCII terminal lacks is not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_debugged = sys.gettrace() is not None  # `python -m pdb` handles its own `quit`
    try:
        # report a missing rich before importing torch
        importlib.import_module(".consoles", __package__)
        with _sigterm_raised():
            return body() or 0
    except (KeyboardInterrupt, bdb.BdbQuit) as ended:
        if is_debugged and isinstance(ended, bdb.BdbQuit):
            raise
        _complain("\nStopped. Unfinished requests were aborted.", "bold")
        return 130
    except (InputError, ModuleNotFoundError) as error:
        text = str(error) if isinstance(error, InputError) else how_to_install(error)
        _complain("error:", "bold red", text)
        return 2


def _complain(word: str, style: str, text: str = "") -> None:
    """Print a word in this style, and a text; without style if rich is missing."""
    try:
        from .consoles import log_console
    except ModuleNotFoundError:
        print(word, text, file=sys.stderr)
    else:
        log_console.print(word, style=style, end=" " if text else "\n")
        if text:
            log_console.print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _sigterm_raised() -> Iterator[None]:
    """Raise SystemExit on SIGTERM inside the block, with the status that a shell shows for it."""
    if threading.current_thread() is not threading.main_thread():  # signals need the main thread
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
