"""Converted GGUF models: `milestone-llm cache` lists them, with `--clear` it removes them.

A GGUF file is converted once, to a folder that loads at once. Nothing else is kept there, and what
is removed is made again when its file is used.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from milestone_llm.cli import Formatter, ended_in_one_line
from milestone_llm.consoles import console


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    name = "milestone-llm cache"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    parser.add_argument("--clear", action="store_true", help="remove all that is listed")
    clear = parser.parse_args(arguments).clear
    return ended_in_one_line(lambda: show(clear))


def show(clear: bool) -> None:
    """Print each converted model with its size, and remove it if it is to be cleared."""
    from milestone_llm.models.gguf_cache import cache_directory

    place = cache_directory()
    folders = sorted(path for path in place.glob("*") if path.is_dir())
    for folder in folders:
        done = "removed" if clear else "kept"
        text = f"{size_of(folder) / 2**20:10,.0f} MiB {done}  {folder.name}"
        console.print(text, soft_wrap=True, highlight=False)
        if clear:
            shutil.rmtree(folder)
            folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
    console.print(f"{len(folders)} converted models in {place}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
