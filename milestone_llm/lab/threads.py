"""Whether torch's CPU threads help each other. On a busy machine they wait for each other instead.

A product of matrices is done when the last thread is. Where another program has one of the cores,
each of the hundreds of products in a step waits for its turn, and a step takes ten times as long.
A load average need not show it (it ends at the container's wall), so it is measured. Nothing here
imports torch before it is needed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from .cli import log_console

NUM_PRODUCTS = 10
NUM_ROUNDS = 15
SECONDS = 0.25
"""After that, the rounds that have been are enough."""
TOO_SLOW = 2.0
"""All threads against one: their time for the same products, from which on they are in the way."""
FAR_SLOWER = 4.0
"""A step against the fastest one like it."""
IN_A_ROW = 3
"""So many steps, since any program may stop for a moment."""
SECONDS_BETWEEN_LOOKS = 10.0


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


def in_the_way(many: float, one: float) -> str:
    """What to do about threads that take so much longer than one; empty if they do not."""
    if many < TOO_SLOW * one:
        return ""
    return (
        f"torch's threads take {many / one:.1f} times as long as one for small products: they wait "
        "for each other, as they do where other programs use the cores. Take --threads 1."
    )


def say(text: str) -> None:
    """Tell who sits at the terminal."""
    log_console.print(text, style="yellow", markup=False)


class ThreadWatch:
    """Says once that threads are in the way: at the start, or when steps become far slower.

    Args:
        device_type: of the model; nothing is watched where it is not "cpu".
        say: called with what to do.
    """

    def __init__(self, device_type: str, say: Callable[[str], object] = say) -> None:
        self._say = say
        self._is_over = device_type != "cpu"
        self._fastest: dict[int, float] = {}
        self._num_slow = 0
        self._look()

    def note_step(self, seconds: float, num_outputs: int) -> None:
        """After each step: its time, and how many requests got a token, for like goes with like."""
        kind = num_outputs.bit_length()
        fastest = self._fastest[kind] = min(seconds, self._fastest.get(kind, math.inf))
        self._num_slow = self._num_slow + 1 if seconds > FAR_SLOWER * fastest else 0
        is_due = time.perf_counter() > self._looked + SECONDS_BETWEEN_LOOKS
        if self._num_slow >= IN_A_ROW and is_due and not self._is_over:
            self._look()

    def _look(self) -> None:
        import torch

        if (
            not self._is_over
            and torch.get_num_threads() > 1
            and (text := in_the_way(*product_times()))
        ):
            self._say(text)
            self._is_over = True
        self._looked = time.perf_counter()
