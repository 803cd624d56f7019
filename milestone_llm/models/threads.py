"""Whether torch's CPU threads help each other. On a busy machine they wait for each other instead.

A product of matrices is done when the last thread is. Where another program has one of the cores,
each of the hundreds of products in a step waits for its turn, and threads that wait keep the other
cores busy with waiting. So they are told to sleep soon (`milestone_llm`), and where they are in the
way even then, one goes on alone. A load average need not show it (it ends at the container's wall),
so it is measured. Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable

NUM_PRODUCTS = 10
NUM_ROUNDS = 15
SECONDS = 0.25
"""After that, the rounds that have been are enough."""
TOO_SLOW = 1.5
"""All threads against one: their time for the same products, from which on they are in the way."""
FAR_SLOWER = 4.0
"""A step against the fastest one like it."""
IN_A_ROW = 3
"""So many steps, since any program may stop for a moment."""
SECONDS_BETWEEN_LOOKS = 10.0
QUIET_MILLISECONDS = 2.0
"""Ten products, on the two cores on which the programs' times were taken."""


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
    """What is wrong with threads that take so much longer than one; empty if nothing is."""
    if many < TOO_SLOW * one:
        return ""
    return (
        f"torch's threads take {many / one:.1f} times as long as one for small products: they wait "
        "for each other, as they do where other programs use the cores."
    )


class ThreadWatch:
    """Goes on with one thread where more are in the way: at the start, or when steps become slow.

    Who has chosen a number (`--threads`, `OMP_NUM_THREADS`) keeps it, and is told.

    Args:
        device_type: of the model; nothing is watched where it is not "cpu".
        say: called, once, with what was found and done.
        may_change: whether the number may change after the start; a comparison would not be fair.
    """

    def __init__(
        self, device_type: str, say: Callable[[str], object], *, may_change: bool = True
    ) -> None:
        self._say = say
        self._may_change = True
        self._is_over = device_type != "cpu"
        self._fastest: dict[int, float] = {}
        self._num_slow = 0
        self.slowness: float | None = None
        """Times that a small product takes here, against quiet cores; None: not measured."""
        self._look()
        self._may_change = may_change

    def note_step(self, seconds: float, num_outputs: int) -> None:
        """After each step: its time, and how many requests got a token, for like goes with like."""
        kind = num_outputs.bit_length()
        fastest = self._fastest[kind] = min(seconds, self._fastest.get(kind, math.inf))
        self._num_slow = self._num_slow + 1 if seconds > FAR_SLOWER * fastest else 0
        is_due = time.perf_counter() > self._looked + SECONDS_BETWEEN_LOOKS
        if self._num_slow >= IN_A_ROW and is_due:
            self._look()

    def _look(self) -> None:
        self._looked = time.perf_counter()
        if self._is_over:
            return
        import torch

        many, one = product_times()
        text = in_the_way(many, one) if torch.get_num_threads() > 1 else ""
        if text and self._may_change and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
            self._say(f"{text} Going on with one (--threads N takes N).")
            many = one
        elif text:
            self._say(f"{text} Take --threads 1.")
        self._is_over = bool(text)
        self.slowness = many / QUIET_MILLISECONDS
