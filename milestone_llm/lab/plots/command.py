"""The command line of every picture. Nothing here imports matplotlib: `--help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def check_suffix(path: Path, what: str) -> str:
    """The ending of a picture's path, in small letters.

    Raises:
        ValueError: the path ends in neither .png nor .svg.
    """
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: a {what} is written as .png or .svg")
    return suffix


def picture_command(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    draw: Callable[[argparse.Namespace], Path],
) -> None:
    """Draw what the command line asks for; bad input ends with code 2 and a line that says why."""
    options = parser.parse_args(arguments)
    try:
        print(f"wrote {draw(options)}")
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except KeyError as error:
        parser.error(f"a record has no field {error}")
    except ValueError as error:
        parser.error(str(error))
