"""One command line for all benches: `python -m m1_single.bench --baseline hf`

A milestone adds scenarios: functions that take a `Bench` and let it run contests. The first line of
a scenario's docstring is its help. Libraries are imported only when something is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milestone_llm.cli import config_fields, console, positive, run_command, try_to_write

from .options import HF_BASELINES, bench_parser

if TYPE_CHECKING:
    from milestone_llm.models.checkpoint import LoadedModel

    from .contest import Contest
    from .measure import Contestant
    from .workloads import WorkItem

__all__ = ["Bench", "bench_command", "config_fields", "positive"]

Scenario = Callable[["Bench"], None]
BaselineMaker = Callable[[Any], "Contestant"]
"""From the engine that is measured to what it is compared with."""


def bench_command(
    milestone: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    *,
    scenarios: Mapping[str, Scenario] | None = None,
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    baselines: Mapping[str, BaselineMaker] | None = None,
    before: Callable[[argparse.Namespace], object] = lambda args: None,
) -> int:
    """The command line of a milestone's bench.

    Args:
        milestone: the package whose `LLMEngine` is measured.
        description: what `--help` begins with.
        arguments: instead of the command line.
        scenarios: by name; "workload" is there anyway.
        options: adds those of the scenarios, and changes defaults.
        baselines: further names for `--baseline`.
        before: what can be done or refused at once, before torch is imported.

    Returns:
        The exit status.
    """
    scenarios = {"workload": workload, **(scenarios or {})}
    about = {name: (make.__doc__ or name).splitlines()[0] for name, make in scenarios.items()}
    parser = bench_parser(milestone, description, about, baselines or ())
    options(parser)
    args = parser.parse_args(arguments)
    bench = Bench(milestone, args, dict(baselines or {}))

    def all_before(args: argparse.Namespace) -> None:
        before(args)
        for path in (args.json, args.markdown, args.explore):
            if path:
                try_to_write(path)
        if args.baseline and args.scenario != "workload":
            raise ValueError(f"--baseline goes with a workload, not with {args.scenario}")

    return run_command(lambda args: bench.main(scenarios[args.scenario]), args, all_before)


class Bench:
    """What a scenario works with: options, model and engines; and what it has measured so far."""

    def __init__(
        self, milestone: str, args: argparse.Namespace, baselines: Mapping[str, BaselineMaker]
    ) -> None:
        self.args = args
        self.contests: list[dict[str, Any]] = []
        self._milestone, self._baselines = milestone, baselines
        self._markdown: list[str] = []

    def main(self, scenario: Scenario) -> None:
        """Run a scenario and write what it has measured."""
        try:
            scenario(self)
        finally:  # what was measured before an error is kept
            if self.contests:
                self._write()

    def _write(self) -> None:
        data: dict[str, Any] = {"scenario": self.args.scenario, "contests": self.contests}
        text = json.dumps(data if len(self.contests) > 1 else self.contests[0], indent=2)
        for path, content in (
            (self.args.json, text + "\n"),
            (self.args.markdown, "\n".join(self._markdown)),
        ):
            if path:
                path.write_text(content, encoding="utf-8")
                console.print(f"written: {path}", markup=False, soft_wrap=True)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model that `--model`, `--dtype` and `--device` name."""
        from milestone_llm.models.checkpoint import load_model

        whole = self.num_ranks == 1  # else each reads its part, when its engine is built
        return load_model(
            self.args.model, dtype=self.args.dtype, device=self.args.device, weights=whole
        )

    @property
    def num_ranks(self) -> int:
        """Processes that the model is cut over."""
        return getattr(self.args, "tensor_parallel_size", 1)

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        size: int = self.loaded.model.config.get_text_config().vocab_size
        return size

    def make_work(self) -> list[WorkItem]:
        """The requests that the options describe.

        Raises:
            ValueError: a range whose MIN is above its MAX.
        """
        from .workloads import WORKLOADS

        sizes: dict[str, Any] = {}
        if self.args.num_requests:
            sizes["num_requests"] = self.args.num_requests
        for name in ("input_len", "output_len"):
            if ends := getattr(self.args, name):
                if ends[0] > ends[1]:
                    option = name.replace("_", "-")
                    raise ValueError(f"--{option}: MIN {ends[0]} is above MAX {ends[1]}")
                sizes[name] = tuple(ends)
        return WORKLOADS[self.args.workload](self.vocab_size, self.args.seed, **sizes)

    def limits(self, items: Sequence[WorkItem]) -> dict[str, Any]:
        """Rows and tokens of a step, and tokens of a request, for engines that serve `items`.

        Raises:
            ValueError: a request is longer than `--max-model-len`.
        """
        args = self.args
        longest = max(len(item.prompt) + item.params.max_tokens for item in items)
        max_model_len = args.max_model_len or longest
        if longest > max_model_len:
            raise ValueError(
                f"the longest request has {longest} tokens, but max_model_len={max_model_len}"
            )
        return {
            "max_num_seqs": args.max_num_seqs or min(len(items), 256),
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_model_len": max_model_len,
        }

    def engine(self, items: Sequence[WorkItem], milestone: str | None = None, **fields: Any) -> Any:
        """An engine under these limits; `fields` go before the options.

        Raises:
            ValueError: limits that do not fit the model or the workload, or an unknown field.
        """
        kind = importlib.import_module(milestone or self._milestone).LLMEngine
        fields = {**self.limits(items), **config_fields(self.args.set), **fields}
        if milestone not in (None, self._milestone):  # an earlier one has fewer fields
            known = kind.config_class.__dataclass_fields__
            fields = {name: value for name, value in fields.items() if name in known}
        if self.num_ranks > 1:
            return kind(self.args.model, dtype=self.args.dtype, device=self.args.device, **fields)
        return kind(self.loaded.model, tokenizer=self.loaded.tokenizer, **fields)

    def baselines(self, engine: Any) -> list[Contestant]:
        """Those that `--baseline` names, doing their work under the engine's limits."""
        from .hf_baselines import BASELINES

        chosen = self.args.baseline
        if "hf" in chosen:
            chosen = [*HF_BASELINES, *(name for name in chosen if name in self._baselines)]
        makers = {**BASELINES, **self._baselines}
        return [makers[name](engine) for name in dict.fromkeys(chosen)]

    def run(self, contest: Contest) -> dict[str, Any]:
        """Print what runs where, measure, print what came out.

        Returns:
            All of it, which `--json` writes in the end.
        """
        from .report import markdown, print_heading, print_report, verdicts

        if self.contests:
            console.print()
        data = contest.setting(self.loaded.name, self.args.seed)
        print_heading(console, data)
        results = contest.measure(contest.contestants, contest.items, self.args.rounds)
        data |= contest.outcome({**results, **contest.earlier})
        data["remarks"] = [*contest.remarks(data), *verdicts(data)]
        print_report(console, data, contest.tables)
        self.contests.append(data)
        self._markdown.append(markdown(data, contest.tables))
        if self.args.explore:
            self._write_page(contest, self.args.explore)
        return data

    def _write_page(self, contest: Contest, path: Path) -> None:
        """Serve the work once more, traced, with the first two engines; nothing of it is timed."""
        from milestone_llm.lab.trace.explore import write_page

        from .measure import traced_run

        if len(self.contests) > 1:
            path = path.with_stem(f"{path.stem}-{len(self.contests)}")
        engines = [each for each in contest.contestants if each.engine is not None][:2]
        write_page([traced_run(each, contest.items) for each in engines], path)
        console.print(f"written: {path}", markup=False, soft_wrap=True)


def workload(bench: Bench) -> None:
    """The engine, and --baseline, on the requests of --workload."""
    from .contest import Contest
    from .measure import engine_contestant
    from .report import STANDARD_TABLES, losses

    items = bench.make_work()
    engine = bench.engine(items)
    contestants = [engine_contestant(engine), *bench.baselines(engine)]
    bench.run(Contest(bench.args.workload, items, contestants, STANDARD_TABLES, losses))
