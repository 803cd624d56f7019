"""The counts beside the engine: plain numbers, which can be sent to HTTP.

At 26,000 tokens a second, a lock for each of them would be felt. They become Prometheus's metrics
when `/metrics` is read (`metrics.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from milestone_llm.frontend.outputs import RequestOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("from a request's arrival to its first token", _SECONDS),
    "inter_token_latency_seconds": ("between two tokens of a request", _SECONDS),
    "e2e_request_latency_seconds": ("from a request's arrival to its end", _SECONDS),
    "request_queue_time_seconds": ("from a request's arrival to its first step", _SECONDS),
    "request_prompt_tokens": ("prompt tokens of a request", _TOKENS),
    "request_generation_tokens": ("output tokens of a request", _TOKENS),
    "iteration_tokens_total": ("tokens of a step", _TOKENS),
    "step_time_seconds": ("of one step of the engine", _SECONDS),
    "step_batch_size": ("rows of a step", _TOKENS),
}
"""What each says, and its bounds."""


class Histogram:
    """How many values are at most each bound.

    Args:
        bounds: ascending.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds and the counts up to them, as Prometheus wants them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        totals, total = [], 0
        for count in list(self.counts):
            total += count
            totals.append(float(total))
        return list(zip(names, totals, strict=True))


class EngineMetrics:
    """What an engine's loop counts."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.ended: Counter[str] = Counter()
        """Ended requests by reason."""
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

    def note_tokens(
        self, output: RequestOutput, arrival_time: float, num_counted: list[int]
    ) -> None:
        """A request has got tokens. Times are those of its first completion.

        Args:
            arrival_time: when the client asked, on the clock of the request's own times.
            num_counted: tokens of each completion that were counted before; brought up to date.
        """
        for completion in output.outputs:
            self.num_generation_tokens += completion.num_tokens - num_counted[completion.index]
            if completion.index:
                num_counted[completion.index] = completion.num_tokens
        times = output.metrics.token_times
        for index in range(num_counted[0], output.outputs[0].num_tokens):
            if index:
                self._itl.observe(times[index] - times[index - 1])
            else:
                self._ttft.observe(times[0] - arrival_time)
                self.num_prompt_tokens += len(output.prompt_token_ids)
        num_counted[0] = output.outputs[0].num_tokens

    def note_end(self, output: RequestOutput, arrival_time: float) -> None:
        """A request has ended, for whatever reason."""
        self.ended[output.finish_reason or "abort"] += 1
        if output.finish_reason in ("abort", "error"):
            return
        observe = self.histograms
        times = output.metrics
        if times.finish_time is not None and times.first_scheduled_time is not None:
            observe["e2e_request_latency_seconds"].observe(times.finish_time - arrival_time)
            queued = times.first_scheduled_time - arrival_time
            observe["request_queue_time_seconds"].observe(queued)
        num_tokens = sum(completion.num_tokens for completion in output.outputs)
        observe["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        observe["request_generation_tokens"].observe(num_tokens)
