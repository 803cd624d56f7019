"""Metrics in Prometheus's format: names, units and labels of vLLM's, with another prefix.

vLLM's are those of vllm/v1/metrics/loggers.py. `OURS_ALONE` has no counterpart there, and the
bounds of histograms are our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from . import http_counts
from .engine_client import EngineReport
from .engine_metrics import HISTOGRAMS, EngineMetrics, Histogram
from .http_counts import DELIVERY, HttpCounts

PREFIX = "milestone_llm:"
OURS_ALONE = {
    "step_time_seconds",
    "step_batch_size",
    "admission_rejections",
    "token_delivery_seconds",
}

Labels = Mapping[str, str]


class Metrics(Collector):
    """What engines count, and what is counted in front of them."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.counts = HttpCounts()
        self._reports = [EngineReport({}, EngineMetrics())]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(self, reports: list[EngineReport] | None) -> bytes:
        """All metrics as text.

        Args:
            reports: of each engine; None repeats the last, when they cannot answer.
        """
        if reports is not None:
            self._reports = reports
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client."""
        families: dict[str, Metric] = {}
        for report in self._reports:
            for family in _of_engine(report, {**self._labels, "engine": report.replica or "0"}):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()
        yield from self._of_http()

    def _of_http(self) -> Iterator[Metric]:
        """What HTTP counts, of all engines together."""
        counts = self.counts
        has_replicas = any(report.replica for report in self._reports)
        labels = {**self._labels, "engine": "all" if has_replicas else "0"}
        yield _counter("generation_tokens", "of answers", counts.num_tokens, labels)
        yield _by_label("request_success", "finished_reason", "ended requests", counts.ends, labels)
        refused = {"max_queued": counts.num_refused}
        yield _by_label("admission_rejections", "reason", "refused requests", refused, self._labels)
        for name, histogram in counts.histograms.items():
            what, _ = http_counts.HISTOGRAMS[name]
            yield _histogram(name, what, histogram, self._labels if name == DELIVERY else labels)


SPECULATION = (
    ("spec_decode_num_drafts", "rows with guesses"),
    ("spec_decode_num_draft_tokens", "tokens guessed"),
    ("spec_decode_num_accepted_tokens", "guesses that came true"),
)


def _of_engine(report: EngineReport, labels: Labels) -> Iterator[Metric]:
    """What an engine counts."""
    stats, metrics = report.stats, report.metrics
    kv = stats.get("kv", {})
    cache = stats.get("prefix_cache", {})
    waiting = stats.get("waiting", 0)
    preempted = stats.get("waiting_preempted", 0)
    used = kv["used"] / kv["total"] if kv.get("total") else 0.0
    by_reason = GaugeMetricFamily(
        f"{PREFIX}num_requests_waiting_by_reason",
        "Requests in the engine's queue: for a row and memory, or since they were preempted.",
        labels=[*labels, "reason"],
    )
    for reason, number in (("capacity", waiting - preempted), ("preempted", preempted)):
        by_reason.add_metric([*labels.values(), reason], number)
    for gauge, what, value in (
        ("num_requests_running", "in the batch", stats.get("running", 0)),
        ("num_requests_waiting", "in the engine's queue", waiting),
        ("kv_cache_usage_perc", "share of KV memory in use, 0 to 1", used),
    ):
        gauges = GaugeMetricFamily(PREFIX + gauge, what, labels=list(labels))
        gauges.add_metric(list(labels.values()), value)
        yield gauges
    yield by_reason
    for counter, what, value in (
        ("prefix_cache_queries", "tokens looked up", cache.get("queried_tokens", 0)),
        ("prefix_cache_hits", "tokens found", cache.get("saved_tokens", 0)),
        ("prompt_tokens", "of requests that got a first token", metrics.num_prompt_tokens),
        ("num_preemptions", "requests that lost their memory", stats.get("preemptions", 0)),
        *((name, what, stats.get(name, 0)) for name, what in SPECULATION),
    ):
        yield _counter(counter, what, value, labels)
    per_position = stats.get("spec_decode_num_accepted_tokens_per_pos", ())
    by_position = {str(position): number for position, number in enumerate(per_position)}
    name, what = "spec_decode_num_accepted_tokens_per_pos", "guesses that came true, by place"
    yield _by_label(name, "position", what, by_position, labels)
    for name, histogram in metrics.histograms.items():
        yield _histogram(name, HISTOGRAMS[name][0], histogram, labels)


def _histogram(name: str, what: str, histogram: Histogram, labels: Labels) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, what, labels=list(labels))
    family.add_metric(list(labels.values()), histogram.buckets(), histogram.sum)
    return family


def _counter(name: str, what: str, value: float, labels: Labels) -> Metric:
    family = CounterMetricFamily(PREFIX + name, what, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by_label(
    name: str, label: str, what: str, counts: Mapping[str, int], labels: Labels
) -> Metric:
    family = CounterMetricFamily(PREFIX + name, what, labels=[*labels, label])
    for reason, number in sorted(counts.items()):
        family.add_metric([*labels.values(), reason], number)
    return family
