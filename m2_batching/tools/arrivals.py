"""When the requests of M2's demo come, and which of them is urgent."""

from __future__ import annotations

import argparse
from dataclasses import replace

from milestone_llm.cli import above_0
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.workloads import WorkItem, with_poisson_arrivals
from milestone_llm.lab.demo.command import numbers


def add_arrival_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `arriving` reads."""
    either = parser.add_mutually_exclusive_group()
    about = "step before which each request comes (default: 0 for all)"
    either.add_argument("--arrivals", type=numbers(0), metavar="STEP,...", help=about)
    about = "requests a second, at random (Poisson)"
    either.add_argument("--rate", type=above_0, metavar="R", help=about)
    add = parser.add_argument
    add("--policy", choices=("fcfs", "priority"), default="fcfs", help="who is served first")
    about = "with --policy priority: a wait of S counts as more urgent by 1 (default: it does not)"
    add("--aging-seconds", type=above_0, metavar="S", help=about)
    about = "of each request, lower is sooner (default with --policy priority: last comes first)"
    add("--priorities", type=numbers(-(10**9)), metavar="P,...", help=about)


def arriving(items: list[WorkItem], args: argparse.Namespace) -> list[WorkItem]:
    """Return the requests with the arrivals and priorities that the options give them.

    Raises:
        InputError: the number of arrivals or priorities is not the number of requests.
    """
    for name in ("arrivals", "priorities"):
        count = len(getattr(args, name) or items)
        if count != len(items):
            raise InputError(f"--{name} has {count} of the {len(items)} numbers that it needs")
    steps = args.arrivals or [0] * len(items)
    default = range(len(items))[::-1] if args.policy == "priority" else [0] * len(items)
    items = [
        replace(item, arrival_step=step, priority=priority)
        for item, step, priority in zip(items, steps, args.priorities or default, strict=True)
    ]
    return items if args.rate is None else with_poisson_arrivals(items, args.rate, args.seed)
