"""A line of figures every ten seconds in which something ran, as vLLM's server prints it.

    prompt 31.4 tok/s, generation 96.1 tok/s, running 3, waiting 0, KV memory 12.5%, ...

Rates and hits are those since the line before, the rest is how things stand. Hits are prompt tokens
found in the prefix cache, of those looked up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from .engine_client import EngineClient, EngineReport

PERIOD_SECONDS = 10.0


class StatsLog:
    """Makes lines of an engine's figures.

    Args:
        write: prints a line.
        clock: gives seconds.
    """

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._write = write
        self._clock = clock
        self._time = clock()
        self._counts: Counter[str] = Counter()

    async def follow(self, client: EngineClient, seconds: float = PERIOD_SECONDS) -> None:
        """Ask for the figures again and again, until this is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            reports = await asyncio.wrap_future(client.report())
            self.note(reports)

    def note(self, reports: Sequence[EngineReport]) -> None:
        """Take the figures of all engines, and write a line if something ran since the last."""
        now, counts, state = self._clock(), Counter[str](), Counter[str]()
        for report in reports:
            cache, kv = report.stats.get("prefix_cache", {}), report.stats["kv"]
            counts["prompt"] += report.metrics.num_prompt_tokens
            counts["generation"] += report.metrics.num_generation_tokens
            counts["steps"] += report.stats["steps"]
            counts["queried"] += cache.get("queried_tokens", 0)
            counts["hit"] += cache.get("saved_tokens", 0)
            state.update({name: report.stats[name] for name in ("running", "waiting")})
            state.update({name: kv[name] for name in ("used", "total")})
        new = {name: max(0, counts[name] - self._counts[name]) for name in counts}
        seconds, self._time, self._counts = max(now - self._time, 1e-9), now, counts
        if not new.get("steps"):
            return
        parts = [f"{name} {new[name] / seconds:,.1f} tok/s" for name in ("prompt", "generation")]
        parts += [f"{name} {state[name]:,}" for name in ("running", "waiting")]
        parts.append(f"KV memory {state['used'] / max(1, state['total']):.1%}")
        if new["queried"]:
            parts.append(f"prefix hits {new['hit'] / new['queried']:.1%}")
        self._write(", ".join(parts))
