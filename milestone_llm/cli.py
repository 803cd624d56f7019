"""What the commands of all milestones share: consoles, a progress bar, and how they end."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from milestone_llm.models.gguf_cache import quiet_transformers

console = Console(highlight=False)
"""Results go here: standard output."""
log_console = Console(stderr=True, highlight=False)
"""Progress and complaints go here."""


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Help with the module docstring as it stands and the default of every option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Only where there is a default worth telling.
        if action.default in (None, False, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def progress_bar(is_hidden: bool = False) -> Progress:
    """A bar with a description, a count (field `count`) and the time; gone when it is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    return Progress(
        *columns,
        console=log_console,
        transient=True,
        refresh_per_second=4,
        disable=is_hidden or not log_console.is_terminal,  # nothing of it belongs in a log
    )


def run_command(body: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> int:
    """Run a command's body; bad input and Ctrl-C end it with one line instead of a traceback.

    Returns:
        The exit status: 0, 2 for bad input, 130 for Ctrl-C.
    """
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            body(args)
    except KeyboardInterrupt:
        log_console.print("\nStopped. Unfinished requests were aborted.", style="bold")
        return 130
    except (ValueError, OSError) as error:
        log_console.print("error:", style="bold red", end=" ")
        log_console.print(str(error), markup=False, soft_wrap=True)
        return 2
    return 0
