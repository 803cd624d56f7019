"""A contest: contestants at the same work, their figures, and all of it as plain data.

A scenario of a milestone makes one or more of these; everything else is the same for all benches.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from milestone_llm.lab.trace.text import plural

from .measure import Contestant, RunResult, measure, medians, speedups
from .workloads import WorkItem

Results = dict[str, list[RunResult]]
"""Results of each contestant, one a round; the others are compared with the first."""
Tables = Mapping[str, Mapping[str, str]]
"""By title the columns of each table: a heading, and how to write its figures, as `str.format`."""


@dataclass(frozen=True)
class Target:
    """A ratio of two contestants' figures, and how large this project wants it at most (None: it is
    only shown).
    """

    meaning: str
    figure: str
    ours: str
    theirs: str
    at_most: float | None = None
    loses: str = ""
    """What to say where the ratio is above 1.02: an optimisation that costs something."""

    def outcome(self, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
        """The ratio of each round, their median, and whether it is small enough."""
        pairs = zip(rounds[self.ours], rounds[self.theirs], strict=True)
        values = [own[self.figure] / its[self.figure] for own, its in pairs]
        ratio = float(np.median(values))
        is_met = None if self.at_most is None else ratio <= self.at_most
        return {**asdict(self), "ratio": ratio, "rounds": values, "is_met": is_met}


@dataclass
class Contest:
    """Contestants at the same work; the first is the one that the others are compared with."""

    title: str
    items: Sequence[WorkItem]
    contestants: Sequence[Contestant]
    tables: Tables
    remarks: Callable[[dict[str, Any]], list[str]] = lambda data: []
    """From all data to sentences: what the figures say, above all against the first contestant."""
    targets: Sequence[Target] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    """Lines of the heading; without any, the first engine and its limits."""
    measure: Callable[..., Results] = measure
    earlier: Results = field(default_factory=dict)
    """Results of contestants for which there is no room beside these."""

    def setting(self, model_name: str, seed: int) -> dict[str, Any]:
        """What runs where: enough to run it again."""
        engines = {each.name: each.engine for each in self.contestants if each.engine is not None}
        first = next(iter(engines.values()))
        return {
            "title": self.title,
            "model": model_name,
            "engine": config_of(first),
            "engines": {name: config_of(engine) for name, engine in engines.items()},
            "about": dict(self.about) or {"engine": limits_text(first)},
            "workload": describe_work(self.title, self.items, seed),
            "environment": environment(first),
            "kv_unit": first.stats()["kv"]["unit"],
        }

    def outcome(self, results: Results) -> dict[str, Any]:
        """What was measured."""
        rounds = {name: [run.figures() for run in runs] for name, runs in results.items()}
        ours, *others = results
        return {
            "rounds": len(rounds[ours]),
            "contestants": {
                name: {"median": medians(figures), "rounds": figures}
                for name, figures in rounds.items()
            },
            "speedups": speedups(results),
            "same_tokens": {
                name: sum(map(list.__eq__, results[ours][0].token_ids, results[name][0].token_ids))
                for name in others
            },
            "targets": [target.outcome(rounds) for target in self.targets],
        }


def config_of(engine: Any) -> dict[str, Any]:
    """An engine's milestone and configuration."""
    own = {"milestone": engine.milestone, **asdict(engine.config)}
    return {**own, "max_model_len": engine.max_model_len}


def limits_text(engine: Any) -> str:
    """An engine and its limits, in words."""
    config = engine.config
    return (
        f"{engine.milestone}, max_num_seqs {config.max_num_seqs}, "
        f"max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"max_model_len {engine.max_model_len}"
    )


def environment(engine: Any) -> dict[str, Any]:
    """Versions, and the machine as far as it matters."""
    device = engine.model.device
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
    }


def machine_text(machine: Mapping[str, Any]) -> str:
    """`environment` in words."""
    return (
        f"{machine['device']}, {plural(machine['threads'], 'CPU thread')}; Python "
        f"{machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}"
    )


def describe_work(name: str, items: Sequence[WorkItem], seed: int) -> dict[str, Any]:
    """A workload in numbers."""
    inputs = [len(item.prompt) for item in items]
    outputs = [item.params.max_tokens for item in items]
    return {
        "name": name,
        "seed": seed,
        "num_requests": len(items),
        "input_tokens": sum(inputs),
        "output_tokens": sum(outputs),
        "input_len": [min(inputs), max(inputs)],
        "output_len": [min(outputs), max(outputs)],
        "temperature": items[0].params.temperature,
    }
