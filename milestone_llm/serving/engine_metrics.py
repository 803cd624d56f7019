"""The counts beside the engine: plain numbers, which can be sent to HTTP.

They are those of steps, and of what a request waits for. Which tokens an answer has in the end, and
why it ended, is counted in HTTP (`http_counts.py`), which finds the stop strings.

At 26,000 tokens a second, a lock for each of them would be felt. They become Prometheus's metrics
when `/metrics` is read (`metrics.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from milestone_llm.core.request import Request

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("from a request's arrival to its first token", SECONDS),
    "inter_token_latency_seconds": ("between two tokens that the engine made", SECONDS),
    "request_queue_time_seconds": ("from a request's arrival to its first step", SECONDS),
    "iteration_tokens_total": ("tokens of a step", TOKENS),
    "step_time_seconds": ("of one step of the engine", SECONDS),
    "step_batch_size": ("rows of a step", TOKENS),
}
"""What each says, and its bounds."""


class Histogram:
    """How many values are at most each bound.

    Args:
        bounds: ascending.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._cells = [0.0] * (len(bounds) + 2)  # larger values, and the sum

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._cells[-1]

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that has come so many times."""
        self._cells[bisect_left(self.bounds, value)] += times
        self._cells[-1] += times * value

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds and the counts up to them, as Prometheus wants them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        totals, total = [], 0.0
        for count in self._cells[:-1]:
            total += count
            totals.append(total)
        return list(zip(names, totals, strict=True))


class EngineMetrics:
    """What an engine's loop counts."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        """That the engine made, also after what HTTP finds to be a stop string."""
        self._ttft = self.histograms["time_to_first_token_seconds"]
        self._itl = self.histograms["inter_token_latency_seconds"]

    def note_step(
        self, seconds: float, before: Mapping[str, int], after: Mapping[str, int]
    ) -> None:
        """A step was computed; `before` and `after` are the engine's counts."""
        num_tokens = sum(after[name] - before[name] for name in ("prefill_tokens", "decode_tokens"))
        self.histograms["step_time_seconds"].observe(seconds)
        self.histograms["step_batch_size"].observe(after["rows"] - before["rows"])
        self.histograms["iteration_tokens_total"].observe(num_tokens)

    def note_first_token(self, request: Request, arrival_time: float, now: float) -> None:
        """A request has got its first token.

        Args:
            arrival_time: when the client asked, in seconds of `time.perf_counter()`, as `now`.
        """
        self._ttft.observe(now - arrival_time)
        if request.first_scheduled_time is not None:
            queued = request.first_scheduled_time - arrival_time
            self.histograms["request_queue_time_seconds"].observe(queued)
        self.num_prompt_tokens += request.num_prompt_tokens

    def note_tokens(self, num_tokens: int, gaps: Mapping[float, int]) -> None:
        """A step has brought tokens.

        Args:
            gaps: seconds between two tokens of a completion, and of how many tokens that is true:
                of most, it is the time of a step.
        """
        self.num_generation_tokens += num_tokens
        for seconds, times in gaps.items():
            self._itl.observe(seconds, times)
