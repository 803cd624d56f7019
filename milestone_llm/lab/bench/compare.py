"""The workload and the engines that a bench's options describe, and their comparison.

A comparison is plain data: the setup, figures of each contestant by round, and remarks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from milestone_llm import MILESTONES
from milestone_llm.cli import config_fields
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.models.checkpoint import LoadedModel, load_model

from . import report
from .hf_baselines import BASELINES
from .measure import Contestant, FactMaker, Results, measure, medians, speedups
from .record import front_matter
from .workloads import WORKLOADS, WorkItem


class Bench:
    """The options of a bench, the objects they describe, and the comparisons made so far."""

    def __init__(
        self,
        milestone: str,
        args: argparse.Namespace,
        record: dict[str, str],
    ) -> None:
        self.args = args
        self.milestone = milestone
        self.num_ranks: int = getattr(args, "tensor_parallel_size", 1)
        """Number of processes (ranks) that the model is sharded over."""
        self.has_ready_model = self.num_ranks == 1
        """Whether engines get the same ready model. If not, each reads its own weights."""
        self.comparisons: list[dict[str, Any]] = []
        self._record = record
        self._markdown: list[str] = []

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model of `--model`, `--dtype` and `--device`."""
        args, weights = self.args, self.has_ready_model
        return load_model(args.model, dtype=args.dtype, device=args.device, weights=weights)

    def make_work(self) -> list[WorkItem]:
        """Return the requests that the options describe."""
        args, names = self.args, ("num_requests", "input_len", "output_len")
        sizes = {name: getattr(args, name) for name in names if getattr(args, name)}
        return WORKLOADS[args.workload](self.loaded.vocab_size, args.seed, **sizes)

    def limits(self, items: Sequence[WorkItem]) -> dict[str, Any]:
        """Return the engine limits for serving `items`: rows and tokens of a step, tokens of a
        request.

        Raises:
            InputError: a request is longer than `--max-model-len`.
        """
        args = self.args
        longest = max(len(item.prompt) + item.params.max_tokens for item in items)
        max_model_len = args.max_model_len or longest
        if longest > max_model_len:
            raise InputError(
                f"the longest request has {longest} tokens, but max_model_len={max_model_len}"
            )
        return {
            "max_num_seqs": args.max_num_seqs or min(len(items), 256),
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_model_len": max_model_len,
        }

    def engine(self, items: Sequence[WorkItem], milestone: str | None = None, **given: Any) -> Any:
        """Build an engine with these limits. Fields in `given` override the options.

        Raises:
            InputError: limits that do not fit the model or the workload, or an unknown field.
        """
        package = importlib.import_module(milestone or self.milestone)
        options = {**self.limits(items), **config_fields(self.args.set), **given}
        if milestone not in (None, self.milestone):  # an earlier milestone has fewer fields
            known = {field.name for field in fields(package.EngineConfig)}
            options = {name: value for name, value in options.items() if name in known}
        if not self.has_ready_model:
            args = self.args
            return package.LLMEngine(args.model, dtype=args.dtype, device=args.device, **options)
        return package.LLMEngine(self.loaded.model, tokenizer=self.loaded.tokenizer, **options)

    def baselines(self, engine: Any, items: Sequence[WorkItem]) -> dict[str, Contestant]:
        """Return the contestants of `--baseline`, with the engine's limits."""
        chosen, made = self.args.baseline, dict[str, Contestant]()
        for name in [*(BASELINES if "hf" in chosen else ()), *chosen]:
            if name in BASELINES:
                label, make = BASELINES[name]
                made[label] = make(engine)
            for package in MILESTONES:
                if package[:2] == name:
                    made[package] = self.engine(items, package)
        return made

    def compare(
        self,
        title: str,
        items: Sequence[WorkItem],
        contestants: Mapping[str, Contestant],
        *,
        tables: report.Tables = report.STANDARD_TABLES,
        facts: FactMaker | None = None,
        about: Mapping[str, str] | None = None,
        earlier: Results | None = None,
        has_bar: bool = True,
    ) -> dict[str, Any]:
        """Print the setup, measure all contestants, and print the results.

        Args:
            contestants: by name; all others are compared with the first.
            facts: computes further figures of an engine.
            about: lines of the heading; empty: the first engine and its limits.
            earlier: results of contestants that did not fit in memory together with these.

        Returns:
            The comparison, which `write` adds to the file of `--json`.
        """
        if self.comparisons:
            console.print()
        engines = {name: own for name, own in contestants.items() if isinstance(own, BaseEngine)}
        first = next(iter(engines.values()))
        data: dict[str, Any] = {
            "title": title,
            "model": self.loaded.name,
            "engine": config_of(first),
            "engines": {name: config_of(engine) for name, engine in engines.items()},
            "about": dict(about or {}),
            "workload": describe_work(title, items, self.args.seed),
            "environment": environment(first),
            "kv_unit": first.stats()["kv"]["unit"],
        }
        report.print_rows(console, report.heading(data).items(), gap=2)
        results = measure(contestants, items, self.args.rounds, facts, has_bar) | (earlier or {})
        data |= outcome(results)
        data["remarks"] = report.same_tokens(data)
        filled, remarks = list(report.titled(data, tables)), data["remarks"]
        report.print_report(console, filled, remarks)
        self.comparisons.append(data)
        self._markdown.append(report.markdown(report.heading(data), filled, remarks))
        return data

    def write(self) -> None:
        """Write the comparisons to the files of `--json` and `--markdown`."""
        found = self.comparisons
        if not found:
            return
        data = {"comparisons": found} if found[1:] else found[0]
        texts = {
            self.args.json: json.dumps({**self._record, **data}, indent=2) + "\n",
            self.args.markdown: front_matter(self._record) + "\n".join(self._markdown),
        }
        for path, text in texts.items():
            if path is not None:
                Path(path).write_text(text, encoding="utf-8")
                console.print(f"written: {path}", markup=False, soft_wrap=True)


def outcome(results: Results) -> dict[str, Any]:
    """Return results as plain data: figures by round, medians, speedups, equal tokens."""
    rounds = {name: [run.figures() for run in runs] for name, runs in results.items()}
    ours, *others = results
    own_tokens = results[ours][0].token_ids
    return {
        "rounds": len(rounds[ours]),
        "contestants": {
            name: {"median": medians(figures), "rounds": figures}
            for name, figures in rounds.items()
        },
        "speedups": speedups(results),
        "same_tokens": {
            name: sum(map(list.__eq__, own_tokens, results[name][0].token_ids)) for name in others
        },
    }


def config_of(engine: Any) -> dict[str, Any]:
    """Return an engine's milestone and configuration."""
    own = {"milestone": engine.milestone, **asdict(engine.config)}
    return {**own, "max_model_len": engine.max_model_len}


def environment(engine: Any) -> dict[str, Any]:
    """Return versions of libraries, and the device, threads and dtype."""
    device = engine.model.device
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
    }


def describe_work(name: str, items: Sequence[WorkItem], seed: int) -> dict[str, Any]:
    """Return a workload's sizes."""
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
