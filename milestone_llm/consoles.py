"""The consoles of all programs. Only their bodies import this module, because rich may be
missing."""

from __future__ import annotations

from rich.console import Console

console = Console(highlight=False, emoji=False)
"""Standard output, for results."""
log_console = Console(stderr=True, highlight=False, emoji=False)
"""Standard error, for progress and errors."""
