"""A thousand replicas on paper: what does a router find, how even is the load, what does it cost?

The router is the real one (`router.py`), with blocks of 16 tokens and names of 32 bytes. Clients
and replicas are simulated, one event after the other:

- Sessions begin at random times (Poisson), 6 prompts a second for each replica on average. Each
  begins with a system prompt of 256..1,024 tokens, drawn by Zipf's law (exponent 1) from ten for
  each replica, and has 3 turns on average (geometric). A turn adds a question of 16..256 tokens and
  an answer of 32..512. The next turn comes after 10 ms for each token of the answer and 10 s of
  thinking (exponential). All policies get the same prompts at the same times.
- A replica has a prefix cache (least recently used goes first). It computes 20,000 prompt tokens
  a second and makes 5,000 output tokens a second, one request's after the other's; an answer takes
  10 ms a token at least. The router hears of what has ended every 10 ms.

Left out: steps and batches; the KV of running requests, which leaves a real cache less; eviction of
part of a session; the network; failures; questions that come later because their answer was late.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from milestone_llm.cli import (
    Formatter,
    add_options,
    console,
    ended_in_one_line,
    positive,
    progress_bar,
)

from .simulated_clients import BLOCK_SIZE, Clients
from .simulated_replicas import Alone, Routed

ALL_CACHES, ONE_CACHE = "one engine, all caches", "one engine, one cache"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.serving.router_simulation",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--replicas", type=positive, default=8, metavar="N")
    add("--prompts", type=positive, default=8000, metavar="N", help="of all sessions")
    add("--cache-tokens", type=positive, default=65_536, metavar="N", help="of one replica's cache")
    add("--stride", type=positive, default=8, metavar="N", help="of the router, in blocks")
    add_options(parser, "seed")
    args = parser.parse_args(arguments)
    return ended_in_one_line(lambda: simulate_all(args))


Report = dict[str, float]
_done: Any = None
"""In a child process: prompts that each of them is through with, for the progress bar."""


def simulate(labels: Sequence[str], args: argparse.Namespace, place: int = 0) -> dict[str, Report]:
    """Some policies of the router, `ALL_CACHES` or `ONE_CACHE`, each with all prompts.

    Args:
        place: in the progress bar.
    """
    sizes = {ALL_CACHES: args.cache_tokens * args.replicas, ONE_CACHE: args.cache_tokens}
    contestants: dict[str, Alone | Routed] = {
        label: Alone(sizes[label]) if label in sizes else Routed(label, args) for label in labels
    }
    stride = args.stride if "prefix" in labels else None  # nobody else reads the names
    clients = Clients(args.replicas, args.prompts, stride, args.seed)
    for count, prompt in enumerate(clients.prompts()):
        for contestant in contestants.values():
            contestant.take(prompt)
        if _done is not None and count % 1000 == 0:
            _done[place] = count
    return {label: contestant.report() for label, contestant in contestants.items()}


def simulate_all(args: argparse.Namespace) -> None:
    """Two processes, as one with the policy prefix takes as long as one with all others."""
    context = multiprocessing.get_context("spawn")
    done = context.Array("q", 2, lock=False)
    shares = [["prefix"], ["round-robin", "random", ALL_CACHES, ONE_CACHE]]
    start, total = time.perf_counter(), 2 * args.prompts
    with (
        ProcessPoolExecutor(2, context, _begin_child, (done,)) as pool,
        progress_bar() as bar,
    ):
        task = bar.add_task("simulated", total=total, count="")
        futures = [pool.submit(simulate, share, args, i) for i, share in enumerate(shares)]
        while not all(future.done() for future in futures):
            bar.update(task, completed=sum(done), count=f"{sum(done) / total:.0%}")
            time.sleep(0.1)
        _print(futures[0].result() | futures[1].result(), args)
    console.print(f"\nAll of it took {time.perf_counter() - start:.0f} s.")


def _begin_child(done: Any) -> None:
    global _done
    _done = done
    gc.disable()  # there are millions of objects, and no circles among them


def _print(reports: dict[str, Report], args: argparse.Namespace) -> None:
    """What clients and replicas get, and what the router costs."""
    console.print(
        f"{args.prompts:,} prompts, {args.replicas:,} replicas with a cache of "
        f"{args.cache_tokens:,} tokens each\n\n"
        "                        prompt tokens  load of one replica     busy   first\n"
        "                           cached      sent, all   at a time  of the   token\n"
        "                                       max   p99      max      time     p99"
    )
    for label, report in reports.items():
        line = f"{label:24}{report['hit_rate']:10.1%}"
        if "busy" in report:
            line += (
                "{sent_max:11.2f}{sent_p99:6.2f}{outstanding_max:9.2f}{busy:10.0%}".format(**report)
                + f"{report['ttft_p99'] * 1e3:9,.0f} ms"
            )
        console.print(line, soft_wrap=True)
    router, best = reports["prefix"], reports[ALL_CACHES]["hit_rate"]
    if not (best and router["names"]):
        console.print(
            "\nThe caches are too small, or the prompts too few: no prefix is remembered."
        )
        return
    console.print(
        f"\nOf what all caches in one engine would find, prefix finds "
        f"{router['hit_rate'] / best:.1%}. It remembers\n"
        f"{router['names']:,} names, one for {args.stride} blocks of {BLOCK_SIZE} tokens: "
        f"{router['bytes'] / 1e6:,.1f} MB, {router['bytes'] / router['names']:,.0f} bytes each.\n"
        f"A decision takes {router['decision_s'] * 1e6:,.1f} us, by round-robin "
        f"{reports['round-robin']['decision_s'] * 1e6:,.1f} us; "
        f"decisions a second: {1 / router['decision_s']:,.0f}.",
    )


if __name__ == "__main__":
    sys.exit(main())
