"""Metrics in Prometheus's format. Names, units and labels are vLLM's, with another prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .engine_client import EngineReport
from .engine_metrics import HISTOGRAMS, EngineMetrics

PREFIX = "milestone_llm:"


class Metrics(Collector):
    """What the engine counts, and what is counted in front of it."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.refused: Counter[str] = Counter()
        """Requests that were not taken in, by reason."""
        self._report = EngineReport({}, EngineMetrics())
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(self, report: EngineReport | None) -> bytes:
        """All metrics as text.

        Args:
            report: None repeats the last, when the engine cannot answer.
        """
        if report is not None:
            self._report = report
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client."""
        stats, metrics = self._report.stats, self._report.metrics
        kv = stats.get("kv", {})
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
            ("prompt_tokens", "of requests that got a first token", metrics.num_prompt_tokens),
            ("generation_tokens", "generated", metrics.num_generation_tokens),
            ("num_preemptions", "requests that lost their memory", stats.get("preemptions", 0)),
        ):
            yield self._counter(name, what, value)
        yield self._by_label("request_success", "finished_reason", "ended requests", metrics.ended)
        yield self._by_label("admission_rejections", "reason", "refused requests", self.refused)
        for name, histogram in metrics.histograms.items():
            family = HistogramMetricFamily(
                PREFIX + name, HISTOGRAMS[name][0], labels=list(self._labels)
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
