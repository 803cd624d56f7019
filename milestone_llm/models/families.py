"""Every causal language model of transformers, tried: `python -m milestone_llm.models.families`.

A tiny model with random weights is built of each type. An engine must give the tokens of Hugging
Face's `generate`, or refuse the model when it is built. There is no third outcome but "not built":
a type that cannot be made small.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from milestone_llm import MILESTONES


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a family is served wrong, else 0."""
    parser = argparse.ArgumentParser("python -m milestone_llm.models.families", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types; all if not given")
    parser.add_argument(
        "--milestone", nargs="+", choices=MILESTONES, default=["m1_single", "m2_batching"],
        help="default: %(default)s, of which the second stands for M3 and M4, too",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    from .family_check import family_names, try_family  # transformers takes seconds

    names, milestones = options.only or family_names(), options.milestone
    if unknown := sorted(set(names).difference(family_names())):
        parser.error(f"transformers has no causal language model of type {', '.join(unknown)}")
    counts: dict[str, Counter[str]] = {milestone: Counter() for milestone in milestones}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in track(names, "Trying families", console=Console(stderr=True)):
        outcomes = try_family(name, milestones)
        for milestone, outcome in outcomes.items():
            counts[milestone][outcome.kind] += 1
        kinds = [outcome.kind for outcome in outcomes.values()]
        details = dict.fromkeys(
            outcome.detail.partition(" (relative error")[0] for outcome in outcomes.values()
        )
        groups.setdefault((*kinds, "; ".join(filter(None, details))), []).append(name)
    table = Table(*milestones, "families", show_lines=True)
    for (*kinds, why), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        reason = f"[italic]{escape(why)}:[/] " if why else ""
        table.add_row(*kinds, f"{reason}{', '.join(members)}")
    Console().print(table)
    for milestone, count in counts.items():
        Console().print(f"{milestone}: {', '.join(f'{n} {kind}' for kind, n in count.items())}")
    return int(any(count["WRONG"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
