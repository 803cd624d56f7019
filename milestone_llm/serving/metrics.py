"""Metrics in Prometheus's format. Names, units and labels are vLLM's, with another prefix.

What happens often is counted by the engine's thread in plain numbers: at 26,000 tokens a second, a
lock for each would be felt. They become Prometheus's metrics when somebody asks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from milestone_llm.engine.outputs import RequestOutput

PREFIX = "milestone_llm:"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
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


class Metrics(Collector):
    """What the server counts."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._ttft = self._histograms["time_to_first_token_seconds"]
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._ended: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Requests that were not taken in, by reason."""
        self._stats: Mapping[str, Any] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # -- from the engine's thread ------------------------------------------------------------

    def note_step(
        self, seconds: float, before: Mapping[str, int], after: Mapping[str, int]
    ) -> None:
        """A step was computed; `before` and `after` are the engine's counts."""
        num_tokens = sum(after[name] - before[name] for name in ("prefill_tokens", "decode_tokens"))
        self._histograms["step_time_seconds"].observe(seconds)
        self._histograms["step_batch_size"].observe(after["rows"] - before["rows"])
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def note_tokens(
        self, output: RequestOutput, arrival_time: float, num_counted: list[int]
    ) -> None:
        """A request has got tokens. Times are those of its first completion.

        Args:
            arrival_time: when the client asked, on the clock of the request's own times.
            num_counted: tokens of each completion that were counted before; brought up to date.
        """
        for completion in output.outputs:
            self._num_generation_tokens += completion.num_tokens - num_counted[completion.index]
            if completion.index:
                num_counted[completion.index] = completion.num_tokens
        times = output.metrics.token_times
        for place in range(num_counted[0], output.outputs[0].num_tokens):
            if place:
                self._itl.observe(times[place] - times[place - 1])
            else:
                self._ttft.observe(times[0] - arrival_time)
                self._num_prompt_tokens += len(output.prompt_token_ids)
        num_counted[0] = output.outputs[0].num_tokens

    def note_end(self, output: RequestOutput, arrival_time: float) -> None:
        """A request has ended, for whatever reason."""
        self._ended[output.finish_reason or "abort"] += 1
        if output.finish_reason in ("abort", "error"):
            return
        observe = self._histograms
        times = output.metrics
        if times.finish_time is not None and times.first_scheduled_time is not None:
            observe["e2e_request_latency_seconds"].observe(times.finish_time - arrival_time)
            queued = times.first_scheduled_time - arrival_time
            observe["request_queue_time_seconds"].observe(queued)
        num_tokens = sum(completion.num_tokens for completion in output.outputs)
        observe["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        observe["request_generation_tokens"].observe(num_tokens)

    # -- when somebody asks ------------------------------------------------------------------

    def page(self, stats: Mapping[str, Any] | None) -> bytes:
        """All metrics as text.

        Args:
            stats: `LLMEngine.stats()`; None repeats the last, when the engine cannot answer.
        """
        if stats is not None:
            self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client."""
        stats, kv = self._stats, self._stats.get("kv", {})
        cache = stats.get("prefix_cache", {})
        waiting = stats.get("waiting", 0)
        preempted = stats.get("waiting_preempted", 0)
        used = kv["used"] / kv["total"] if kv.get("total") else 0.0
        yield self._gauge("num_requests_running", "in the batch", stats.get("running", 0))
        yield self._gauge("num_requests_waiting", "in the engine's queue", waiting)
        by_reason = GaugeMetricFamily(
            f"{PREFIX}num_requests_waiting_by_reason",
            "Requests in the engine's queue: for a row and memory, or since they were preempted.",
            labels=[*self._labels, "reason"],
        )
        for reason, number in (("capacity", waiting - preempted), ("preempted", preempted)):
            by_reason.add_metric([*self._labels.values(), reason], number)
        yield by_reason
        yield self._gauge("kv_cache_usage_perc", "share of KV memory in use, 0 to 1", used)
        for name, what, value in (
            ("prefix_cache_queries", "tokens looked up", cache.get("queried_tokens", 0)),
            ("prefix_cache_hits", "tokens found", cache.get("saved_tokens", 0)),
            ("prompt_tokens", "of requests that got a first token", self._num_prompt_tokens),
            ("generation_tokens", "generated", self._num_generation_tokens),
            ("num_preemptions", "requests that lost their memory", stats.get("preemptions", 0)),
        ):
            yield self._counter(name, what, value)
        yield self._by_label("request_success", "finished_reason", "ended requests", self._ended)
        yield self._by_label("admission_rejections", "reason", "refused requests", self.refused)
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(
                PREFIX + name, _HISTOGRAMS[name][0], labels=list(self._labels)
            )
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_label(self, name: str, label: str, what: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, what, labels=[*self._labels, label])
        for reason, number in sorted(counts.items()):
            family.add_metric([*self._labels.values(), reason], number)
        return family
