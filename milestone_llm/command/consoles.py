"""Where programs print. Only their bodies import this: whoever runs them may have no rich."""

from __future__ import annotations

from rich.console import Console

console = Console(highlight=False, emoji=False)
"""Results go here: standard output."""
log_console = Console(stderr=True, highlight=False, emoji=False)
"""Progress and complaints go here."""
