"""Whether torch's CPU threads make small products faster. On a busy machine they do not.

A matrix product is finished when the last thread is. If another program uses one of the cores, each
of the hundreds of products in a step waits for its thread on that core, and threads that wait keep
the other cores busy. So programs make waiting threads sleep soon. If several threads are slower
even then, one goes on alone. This is measured, because a load average may not show it (it counts
only processes in the container). Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

NUM_SPINS = 10_000
"""How often a thread of torch checks for work before it sleeps. GNU's OpenMP has 300,000,
milliseconds in which other programs cannot use the core. With 1,000, threads sleep between two
products of a layer, and to wake them takes longer than a small product."""
NUM_PRODUCTS = 10
NUM_ROUNDS = 15
SECONDS = 0.25
"""After this time, the rounds that are done are enough."""
TOO_SLOW = 1.5
"""If all threads take this many times as long as one for the same products, one is used."""
QUIET_MILLISECONDS = 2.0
"""Milliseconds of ten products, on the two cores on which the programs' durations were measured."""


def let_threads_sleep() -> None:
    """Let torch's threads sleep after `NUM_SPINS` checks, unless the user has chosen how they wait.

    Call it before importing torch: OpenMP reads the environment when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))


def product_times() -> tuple[float, float]:
    """Return milliseconds for ten products of a small step, with all of torch's threads and with
    one."""
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
            # other programs slow both down
            pairs.append((milliseconds(num_threads), milliseconds(1)))
    finally:
        torch.set_num_threads(num_threads)
    many, one = (statistics.median(times) for times in zip(*pairs, strict=True))
    return many, one


def slowness() -> float:
    """Return how many times longer a small product takes here than on idle cores."""
    return product_times()[0] / QUIET_MILLISECONDS


def settle_threads(say: Callable[[str], object]) -> None:
    """Use one thread if several are slower.

    If the user has chosen a number (`--threads`, `OMP_NUM_THREADS`), it is kept, with a message.

    Args:
        say: called with what was measured and done.
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
