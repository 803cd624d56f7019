"""When the requests of M2's demo come, and which of them is urgent."""

from __future__ import annotations

import argparse
from dataclasses import replace

from milestone_llm.lab.bench.workloads import WorkItem, with_poisson_arrivals
from milestone_llm.lab.demo.command import numbers


def add_arrival_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `arriving` reads."""
    add = parser.add_argument
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--arrivals",
        type=numbers(0),
        metavar="STEP,...",
        help="step before which each request comes (default: 0 for all)",
    )
    arrivals.add_argument(
        "--rate", type=float, metavar="R", help="requests a second, at random (Poisson)"
    )
    add("--policy", choices=("fcfs", "priority"), default="fcfs", help="who is served first")
    add(
        "--priorities",
        type=numbers(-(10**9)),
        metavar="P,...",
        help="of each request, lower is sooner (default with --policy priority: last comes first)",
    )


def arriving(items: list[WorkItem], args: argparse.Namespace) -> list[WorkItem]:
    """The requests with the arrivals and priorities that the options give them.

    Raises:
        ValueError: not one arrival or priority a request, or a rate that is not above 0.
    """
    for name in ("arrivals", "priorities"):
        count = len(getattr(args, name) or items)
        if count != len(items):
            raise ValueError(f"--{name} has {count} of the {len(items)} numbers that it needs")
    if args.rate is not None and not args.rate > 0:
        raise ValueError(f"--rate must be above 0 requests a second, got {args.rate:g}")
    steps = args.arrivals or [0] * len(items)
    default = range(len(items))[::-1] if args.policy == "priority" else [0] * len(items)
    items = [
        replace(item, arrival_step=step, priority=priority)
        for item, step, priority in zip(items, steps, args.priorities or default, strict=True)
    ]
    return items if args.rate is None else with_poisson_arrivals(items, args.rate, args.seed)
