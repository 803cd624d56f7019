"""The programs by one command, which `pip install` makes: `milestone-llm --milestone m2 demo`

demo, walkthrough, bench and serve are those of a milestone (`python -m m2_batching.demo`), play is
`milestone_llm.lab.playground`, explore is `milestone_llm.lab.explorer`, chat is
`milestone_llm.lab.chat`, cache is `milestone_llm.lab.cache`. What follows the name of a program are
its own options: `milestone-llm serve --help` lists them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import MILESTONES, __version__
from .cli import Formatter

OF_A_MILESTONE = ("demo", "walkthrough", "bench", "serve")
OF_ALL = {
    "play": "playground.__main__",
    "explore": "explorer.__main__",
    "chat": "chat",
    "cache": "cache",
}
"""Programs, and their modules in the lab."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the command line names. Returns its exit status."""
    names = {name[:2]: name for name in MILESTONES}
    parser = argparse.ArgumentParser(
        prog="milestone-llm", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add("--milestone", choices=names, default="m5", help="whose demo, walkthrough, bench or server")
    add("program", choices=[*OF_A_MILESTONE, *OF_ALL])
    add("options", nargs=argparse.REMAINDER, help="of the program")
    args = parser.parse_args(arguments)
    module = f"{names[args.milestone]}.{args.program}"
    if args.program in OF_ALL:
        module = f"milestone_llm.lab.{OF_ALL[args.program]}"
    status: int = importlib.import_module(module).main(args.options)
    return status


if __name__ == "__main__":
    sys.exit(main())
