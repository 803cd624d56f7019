"""The server's metrics: `/metrics` in Prometheus's format, and a log line every ten seconds.

Names, units and labels are vLLM's (vllm/v1/metrics/loggers.py), with another prefix. The names in
`OURS_ALONE` do not exist there, and the bounds of histograms are our own.

Everything is counted in HTTP's process: engines send the times of steps with their tokens. An
engine's gauges (running, waiting, KV memory) are asked for when they are needed (`EngineReport`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..engine.client import EngineClient, EngineReport, StepFigures

if TYPE_CHECKING:
    from milestone_llm.core.outputs import RequestFacts
    from milestone_llm.frontend.output_processor import RequestState

PREFIX = "milestone_llm:"
OURS_ALONE = {"step_time_seconds", "step_batch_size", "admission_rejections", "decoder_info"}
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OF_ENGINES = {
    "time_to_first_token_seconds": ("from a request's arrival to its first token", SECONDS),
    "inter_token_latency_seconds": ("between two tokens that the engine made", SECONDS),
    "request_queue_time_seconds": ("from a request's arrival to its first step", SECONDS),
    "iteration_tokens_total": ("tokens of a step", TOKENS),
    "step_time_seconds": ("of one step of the engine", SECONDS),
    "step_batch_size": ("rows of a step", TOKENS),
}
"""Histograms of each engine: descriptions and bucket bounds."""
OF_ANSWERS = {
    "e2e_request_latency_seconds": ("from a request's arrival to its end", SECONDS),
    "request_prompt_tokens": ("prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("output tokens of a request", TOKENS),
}
"""Histograms of answers, over all engines together."""
ENDS = ("stop", "length", "abort", "error")
PERIOD_SECONDS = 10.0
"""Seconds between two log lines."""


class Metrics:
    """All metrics of a server. Used in HTTP's thread only.

    Args:
        engine: label of the metrics that are counted over all engines together.
    """

    def __init__(self, model_name: str, engine: str = "0") -> None:
        prometheus_client.disable_created_metrics()  # vLLM has no such series either
        self.registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._standing = Standing(model_name, [EngineReport({}, engine)])
        self.registry.register(self._standing)
        self._engines: dict[str, EngineMetrics] = {}
        self._of_engines = self._histograms(OF_ENGINES)
        self._prompt_tokens = self._counter("prompt_tokens", "of requests that got a first token")
        own = {"model_name": model_name, "engine": engine}
        answers = self._histograms(OF_ANSWERS)
        self._of_answers = {name: each.labels(**own) for name, each in answers.items()}
        self._ends = self._counter("request_success", "ended requests", "finished_reason")
        for reason in ENDS:
            self._ends.labels(**own, finished_reason=reason)
        self._own = own
        self.generation_tokens = self._counter("generation_tokens", "of answers").labels(**own)
        """Output tokens of answers; tokens after a stop string are not counted."""
        what, labels = "refused requests", ("model_name", "reason")
        refused = Counter(f"{PREFIX}admission_rejections", what, labels, registry=self.registry)
        self.refused = refused.labels(model_name=model_name, reason="max_queued")

    def _histograms(
        self, wanted: Mapping[str, tuple[str, tuple[float, ...]]]
    ) -> dict[str, Histogram]:
        labels = ("model_name", "engine")
        return {
            name: Histogram(PREFIX + name, what, labels, registry=self.registry, buckets=bounds)
            for name, (what, bounds) in wanted.items()
        }

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(
            PREFIX + name, what, ("model_name", "engine", *labels), registry=self.registry
        )

    def of(self, engine: str) -> EngineMetrics:
        """Return the metrics of one engine."""
        if engine not in self._engines:
            labels = {"model_name": self._model_name, "engine": engine}
            histograms = {name: each.labels(**labels) for name, each in self._of_engines.items()}
            prompt_tokens = self._prompt_tokens.labels(**labels)
            self._engines[engine] = EngineMetrics(histograms, prompt_tokens)
        return self._engines[engine]

    def note_end(self, state: RequestState, arrival_time: float) -> None:
        """Count a request whose completions have all ended, for any reason.

        Args:
            arrival_time: when the client asked, in seconds of `time.perf_counter()`.
        """
        reasons = [completion.finish_reason or "abort" for completion in state.completions]
        reason = "error" if "error" in reasons else reasons[0]
        self._ends.labels(**self._own, finished_reason=reason).inc()
        if reason in ("abort", "error"):
            return
        num_tokens = sum(len(completion.token_ids) for completion in state.completions)
        for name, value in (
            ("e2e_request_latency_seconds", time.perf_counter() - arrival_time),
            ("request_prompt_tokens", len(state.prompt_token_ids)),
            ("request_generation_tokens", num_tokens),
        ):
            self._of_answers[name].observe(value)

    def totals(self) -> dict[str, float]:
        """Return the prompt and output tokens until now, of all engines together."""
        counters = {"prompt": self._prompt_tokens, "generation": self.generation_tokens}
        return {
            name: sum(sample.value for family in each.collect() for sample in family.samples)
            for name, each in counters.items()
        }

    def page(self, reports: list[EngineReport] | None) -> bytes:
        """Return all metrics as text.

        Args:
            reports: one of each engine; None, when they do not answer, repeats the last ones.
        """
        if reports is not None:
            self._standing.reports = reports
        for report in self._standing.reports:
            self.of(report.engine)  # creates the metrics of an engine that has done nothing yet
        return prometheus_client.generate_latest(self.registry)


class EngineMetrics:
    """Metrics of one engine."""

    def __init__(self, histograms: Mapping[str, Histogram], prompt_tokens: Counter) -> None:
        self._prompt_tokens = prompt_tokens
        self._ttft = histograms["time_to_first_token_seconds"]
        self._queue_time = histograms["request_queue_time_seconds"]
        self.itl = histograms["inter_token_latency_seconds"]
        self._of_steps = [
            histograms[name]
            for name in ("step_time_seconds", "step_batch_size", "iteration_tokens_total")
        ]

    def note_steps(self, steps: Sequence[StepFigures]) -> None:
        """Record the duration, rows and tokens of each step."""
        for step in steps:
            for histogram, value in zip(self._of_steps, step, strict=True):
                histogram.observe(value)

    def note_first_token(
        self, num_prompt_tokens: int, arrival_time: float, now: float, facts: RequestFacts | None
    ) -> None:
        """Record a request's first token. Times are in seconds of `time.perf_counter()`."""
        self._ttft.observe(now - arrival_time)
        if facts is not None and facts.first_scheduled_time is not None:
            self._queue_time.observe(facts.first_scheduled_time - arrival_time)
        self._prompt_tokens.inc(num_prompt_tokens)


class Standing(Collector):
    """Gauges and counters of the engines, as their last reports have them."""

    def __init__(self, model_name: str, reports: list[EngineReport]) -> None:
        self._model_name = model_name
        self.reports = reports

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the last reports. For prometheus-client."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for report in self.reports:
            for kind, name, what, values, *by in _of_engine(report.stats):
                labels = ["model_name", "engine", *by]
                family = families.setdefault(name, kind(PREFIX + name, what, labels=labels))
                for key, value in values.items():
                    family.add_metric([self._model_name, report.engine, *key], value)
        yield from families.values()


def _of_engine(stats: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield (kind, name, description, values by further labels, names of these labels...)."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    kv, cache = stats.get("kv", {}), stats.get("prefix_cache", {})
    waiting, preempted = stats.get("waiting", 0), stats.get("waiting_preempted", 0)
    used = kv["used"] / kv["total"] if kv.get("total") else 0.0
    decoder = {(str(stats["decoder"]),): 1} if "decoder" in stats else {}
    yield gauge, "decoder_info", "the decoder that computes", decoder, "decoder"
    yield gauge, "num_requests_running", "in the batch", {(): stats.get("running", 0)}
    yield gauge, "num_requests_waiting", "in the engine's queue", {(): waiting}
    yield gauge, "kv_cache_usage_perc", "share of KV memory in use, 0 to 1", {(): used}
    what = "Requests in the engine's queue: for a row and memory, or since they were preempted."
    reasons = {("capacity",): waiting - preempted, ("preempted",): preempted}
    yield gauge, "num_requests_waiting_by_reason", what, reasons, "reason"
    queried, saved = cache.get("queried_tokens", 0), cache.get("saved_tokens", 0)
    yield counter, "prefix_cache_queries", "tokens looked up", {(): queried}
    yield counter, "prefix_cache_hits", "tokens found", {(): saved}
    what = "requests that lost their memory"
    yield counter, "num_preemptions", what, {(): stats.get("preemptions", 0)}
    for name, what in (
        ("spec_decode_num_drafts", "rows with guesses"),
        ("spec_decode_num_draft_tokens", "tokens guessed"),
        ("spec_decode_num_accepted_tokens", "guesses that came true"),
    ):
        yield counter, name, what, {(): stats.get(name, 0)}
    name, what = "spec_decode_num_accepted_tokens_per_pos", "guesses that came true, by place"
    by_position = {(str(at),): number for at, number in enumerate(stats.get(name, ()))}
    yield counter, name, what, by_position, "position"


class StatsLog:
    """Logs a line of figures every ten seconds if steps ran, as vLLM's server does.

        prompt 31.4 tok/s, generation 96.1 tok/s, running 3, waiting 0, KV memory 12.5%, ...

    Rates and prefix hits are those since the last line; the rest is the current state. Prefix hits
    are prompt tokens found in the prefix cache, as a share of those looked up.

    Args:
        write: prints a line.
        clock: returns seconds.
    """

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._write = write
        self._clock = clock
        self._time = clock()
        self._counts: dict[str, float] = {}

    async def follow(
        self, client: EngineClient, metrics: Metrics, seconds: float = PERIOD_SECONDS
    ) -> None:
        """Ask for the reports every `seconds`, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            reports = await asyncio.wrap_future(client.report())
            self.note([report.stats for report in reports], metrics.totals())

    def note(self, stats: Sequence[Mapping[str, Any]], totals: Mapping[str, float]) -> None:
        """Take the stats of all engines, and write a line if steps ran since the last call.

        Args:
            totals: those of `Metrics.totals`.
        """

        def total(name: str, of: str | None = None) -> float:
            return sum((each if of is None else each.get(of, {})).get(name, 0) for each in stats)

        now, counts = self._clock(), {**totals, "steps": total("steps")}
        counts["queried"] = total("queried_tokens", of="prefix_cache")
        counts["hit"] = total("saved_tokens", of="prefix_cache")
        new = {name: max(0, counts[name] - self._counts.get(name, 0)) for name in counts}
        seconds, self._time, self._counts = max(now - self._time, 1e-9), now, counts
        if not new["steps"]:
            return
        parts = [f"{name} {new[name] / seconds:,.1f} tok/s" for name in ("prompt", "generation")]
        parts += [f"{name} {total(name):,}" for name in ("running", "waiting")]
        parts.append(f"KV memory {total('used', of='kv') / max(1, total('total', of='kv')):.1%}")
        if new["queried"]:
            parts.append(f"prefix hits {new['hit'] / new['queried']:.1%}")
        self._write(", ".join(parts))
