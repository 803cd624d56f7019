"""What all commands share: options with one name everywhere, consoles, a progress bar, the ending.

Nothing here imports torch or transformers, so that `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import bdb
import contextlib
import gc
import io
import json
import math
import os
import pdb
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from milestone_llm.core.errors import InputError

from .threads import let_waiting_threads_sleep

console = Console(highlight=False, emoji=False)
"""Results go here: standard output."""
log_console = Console(stderr=True, highlight=False, emoji=False)
"""Progress and complaints go here."""


def warn(text: str) -> None:
    """Tell who sits at the terminal."""
    log_console.print(text, style="yellow", markup=False)


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Help with the module docstring as it stands and the default of every option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS) or action.default == []:
            return action.help  # there is no default to speak of
        return super()._get_help_string(action)


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def whole_number(text: str) -> int:
    """An argparse type: a whole number, 0 or above."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def above_0(text: str) -> float:
    """An argparse type: a finite number above 0."""
    number = at_least_0(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def at_least_0(text: str) -> float:
    """An argparse type: a finite number, 0 or above."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return number


_COUNT: dict[str, Any] = {"type": positive, "metavar": "N"}
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
    "explore": {
        "type": Path,
        "metavar": "PATH.html",
        "help": "write a page there that replays what the engine did",
    },
    "json": {"type": Path, "metavar": "PATH", "help": "write everything measured there"},
    "out": {
        "type": Path,
        "default": Path("runs"),
        "metavar": "FOLDER",
        "help": "where pictures go",
    },
}


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add some of `OPTIONS`, with other defaults where given."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    parser.set_defaults(**defaults)


def config_fields(settings: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """`block_size=32` as `{"block_size": 32}`; what is no JSON value is a string.

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
    """Find out before the work, and not after it, whether a file can be written.

    Raises:
        InputError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    if is_new:
        path.unlink()


class DebuggableProgress(Progress):
    """A progress bar that leaves the terminal to `breakpoint()` and `pdb.set_trace()`.

    Both stop it. It comes back with the first update after pdb's `continue`.
    """

    is_suspended = False

    def start(self) -> None:
        """Show the bar."""
        super().start()
        self.is_suspended = False
        if not self.disable:
            self._set_trace, pdb.set_trace = pdb.set_trace, self._debug  # what breakpoint() calls

    def stop(self) -> None:
        """Take the bar away."""
        if pdb.set_trace == self._debug:
            pdb.set_trace = self._set_trace
        super().stop()

    def update(self, *args: Any, **fields: Any) -> None:
        """Set the fields of a task, and show the bar again when the debugger has gone on."""
        if self.is_suspended and sys.gettrace() is None:
            self.start()
        super().update(*args, **fields)

    def _debug(self, *, header: str | None = None) -> None:
        self.stop()
        self.is_suspended = True
        debugger = pdb.Pdb(nosigint=True)  # Ctrl-C still ends the program
        if header is not None:
            debugger.message(header)
        debugger.set_trace(sys._getframe().f_back)


def progress_bar(is_hidden: bool = False) -> Progress:
    """A bar with a description, a count (field `count`) and the time; gone when it is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    # Nothing of it belongs in a log, or between the lines of `python -m pdb`.
    is_hidden = is_hidden or not log_console.is_terminal or sys.gettrace() is not None
    return DebuggableProgress(
        *columns, console=log_console, transient=True, refresh_per_second=4, disable=is_hidden
    )


def run_command(
    body: Callable[[argparse.Namespace], object],
    args: argparse.Namespace,
    before: Callable[[argparse.Namespace], object] = lambda args: None,
) -> int:
    """Run a command's body; an `InputError`, Ctrl-C and pdb's `quit` end it with one line.

    Args:
        body: imports the libraries that it needs, so that Ctrl-C is caught meanwhile, too.
        args: its argument; `--threads` is obeyed here.
        before: what can be said or refused at once, before torch is imported.

    Returns:
        The exit status: 0, 2 for bad input, 130 for Ctrl-C. Whatever else is raised stays raised.
    """

    def whole() -> None:
        before(args)
        with model_libraries(getattr(args, "threads", None)):
            body(args)

    return ended_in_one_line(whole)


@contextlib.contextmanager
def model_libraries(num_threads: int | None) -> Iterator[None]:
    """Import torch and transformers, and keep them quiet within.

    Args:
        num_threads: CPU threads, no more than cores; None leaves them to torch.
    """
    let_waiting_threads_sleep()
    from milestone_llm.models.pretrained import quiet_transformers

    if num_threads:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # chosen, and to be kept
        import torch

        from milestone_llm.models.machine import usable_cores

        if num_threads > (cores := usable_cores()):
            log_console.print(f"--threads {num_threads}: there are {cores} cores, and so threads.")
        torch.set_num_threads(min(num_threads, cores))
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def ended_in_one_line(body: Callable[[], object]) -> int:
    """`run_command` for a body that needs no model in this process. Returns the exit status.

    SIGTERM ends it as an exception would, so that programs that it started are ended, too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an umlaut for an ASCII terminal is no error
            stream.reconfigure(errors="replace")
    is_debugged = sys.gettrace() is not None  # `python -m pdb` wants to see its own `quit`
    try:
        with _sigterm_raised():
            body()
    except (KeyboardInterrupt, bdb.BdbQuit) as ended:
        if is_debugged and isinstance(ended, bdb.BdbQuit):
            raise
        log_console.print("\nStopped. Unfinished requests were aborted.", style="bold")
        return 130
    except InputError as error:
        log_console.print("error:", style="bold red", end=" ")
        log_console.print(str(error), markup=False, soft_wrap=True)
        return 2
    return 0


@contextlib.contextmanager
def _sigterm_raised() -> Iterator[None]:
    """Within, SIGTERM raises SystemExit with the status that a shell gives to its dead."""
    if threading.current_thread() is not threading.main_thread():  # it has no say in signals
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def freeze_garbage() -> None:
    """Exclude the objects that exist now from garbage collection: libraries, model, engine.

    It would look through all of that now and then, which stops a fast engine for some 0.2 s. It
    concerns the whole process, so programs do it (bench, server), and no engine.
    """
    gc.collect()
    gc.freeze()
