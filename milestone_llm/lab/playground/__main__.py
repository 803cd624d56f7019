"""The schedulers of M1 to M4 under your hands: `python -m milestone_llm.lab.playground`

A page at 127.0.0.1. Every change runs the real scheduler and KV manager again, over a model that
costs nothing: tokens follow a rule, and a formula says how long a step would take.

  --scheduler my_scheduler.py     yours, beside the milestone's; when you save the file, the page
                                  shows the new run beside the old one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from milestone_llm.cli import Formatter, ended_in_one_line, whole_number
from milestone_llm.core.errors import InputError


def serve(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from milestone_llm.consoles import console

    from .own import OwnFile
    from .own_process import InAProcess
    from .server import PlaygroundServer
    from .service import Playground

    playground = Playground(OwnFile(args.scheduler, InAProcess) if args.scheduler else None)
    try:
        server = PlaygroundServer(playground, args.port)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot serve at port {args.port}: {error}") from None
    with server:
        console.print(f"The playground is at {server.url} (Ctrl-C ends it)", soft_wrap=True)
        server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    name = "python -m milestone_llm.lab.playground"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    meaning = "at 127.0.0.1; 0 takes a free one"
    parser.add_argument("--port", type=whole_number, default=8100, metavar="N", help=meaning)
    meaning = "a file with a scheduler: a milestone's copied and changed, say"
    parser.add_argument("--scheduler", type=Path, metavar="PATH.py", help=meaning)
    args = parser.parse_args(arguments)
    return ended_in_one_line(lambda: serve(args))


if __name__ == "__main__":
    sys.exit(main())
