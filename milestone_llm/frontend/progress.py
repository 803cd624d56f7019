"""A bar on stderr: how many requests of a call are done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs. Yields what to call with the number that is still open."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("Prompts", total=total)
        yield lambda num_open: progress.update(task, completed=total - num_open)
