"""Whether torch's CPU threads help each other. On a busy machine they wait for each other instead.

A product of matrices is done when the last thread is. Where another program has one of the cores,
each of the hundreds of products in a step waits for its turn, and threads that wait keep the other
cores busy with waiting. So programs tell them to sleep soon, and where they are in the way even
then, one goes on alone. A load average need not show it (it ends at the container's wall),
so it is measured. Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

NUM_SPINS = 10_000
"""How often a thread of torch's looks for work before it sleeps. GNU's OpenMP has 300,000,
milliseconds in which other programs miss the core; with 1,000 it sleeps between two products of a
layer, and to wake it takes longer than a small product."""
NUM_PRODUCTS = 10
NUM_ROUNDS = 15
SECONDS = 0.25
"""After that, the rounds that have been are enough."""
TOO_SLOW = 1.5
"""All threads against one: their time for the same products, from which on they are in the way."""
QUIET_MILLISECONDS = 2.0
"""Ten products, on the two cores on which the programs' times were taken."""


def let_threads_sleep() -> None:
    """Let torch's threads sleep after `NUM_SPINS`, unless the user has chosen how they wait.

    To be called by a program before it imports torch: OpenMP reads the environment when it loads.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))


def product_times() -> tuple[float, float]:
    """Milliseconds for ten products of a small step with all of torch's threads, and with one."""
    import torch

    num_threads = torch.get_num_threads()
    rows, weight = torch.rand(8, 576), torch.rand(576, 1536)  # SmolLM2's gate, eight requests

    def milliseconds(count: int) -> float:
        torch.set_num_threads(count)
        rows @ weight  # wakes the threads
        start = time.perf_counter()
        for _ in range(NUM_PRODUCTS):
            rows @ weight
        return 1e3 * (time.perf_counter() - start)

    pairs: list[tuple[float, float]] = []
    start = time.perf_counter()
    try:
        while len(pairs) < 3 or (len(pairs) < NUM_ROUNDS and time.perf_counter() < start + SECONDS):
            pairs.append((milliseconds(num_threads), milliseconds(1)))  # a slow moment hits both
    finally:
        torch.set_num_threads(num_threads)
    many, one = (statistics.median(times) for times in zip(*pairs, strict=True))
    return many, one


def slowness() -> float:
    """Times that a small product takes here, against quiet cores."""
    return product_times()[0] / QUIET_MILLISECONDS


def settle_threads(say: Callable[[str], object]) -> None:
    """Go on with one thread where more are in the way.

    Who has chosen a number (`--threads`, `OMP_NUM_THREADS`) keeps it, and is told.

    Args:
        say: called with what was found and done.
    """
    import torch

    if torch.get_num_threads() == 1:
        return
    many, one = product_times()
    if many < TOO_SLOW * one:
        return
    found = (
        f"torch's threads take {many / one:.1f} times as long as one for small products: they wait "
        "for each other, as they do where other programs use the cores."
    )
    if "OMP_NUM_THREADS" in os.environ:
        say(f"{found} Take --threads 1.")
    else:
        torch.set_num_threads(1)
        say(f"{found} Going on with one (--threads N takes N).")
