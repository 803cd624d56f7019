"""What the demos of all milestones share: options, serving with progress, and what is shown."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from milestone_llm.bench.command import positive
from milestone_llm.bench.workloads import CLASSIC_PROMPTS, WorkItem, classic, serve
from milestone_llm.cli import Formatter, console, progress_bar
from milestone_llm.engine.outputs import RequestOutput
from milestone_llm.models.checkpoint import DEFAULT_MODEL
from milestone_llm.plots.timeline import draw_timeline
from milestone_llm.trace.console import print_telling
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.tracer import Tracer


@dataclass
class DemoRun:
    """A workload that an engine has served."""

    label: str
    outputs: list[RequestOutput]
    """In the order of the workload."""
    records: list[StepRecord]

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests and their completions."""
        return sum(len(c.token_ids) for output in self.outputs for c in output.outputs)

    @property
    def start(self) -> float:
        """When the first request came, in seconds of `time.perf_counter()`."""
        return min(output.metrics.arrival_time for output in self.outputs)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(output.metrics.finish_time or 0.0 for output in self.outputs) - self.start

    @property
    def useful_share(self) -> float:
        """Share of computed positions that belonged to a request and not to padding."""
        useful = sum(rec.num_prefill_tokens + rec.num_decode_tokens for rec in self.records)
        return useful / (useful + sum(record.num_padding_tokens for record in self.records))

    @property
    def rows_per_step(self) -> float:
        """Rows of a step, padding included, on average."""
        return statistics.fmean(len(record.batch) for record in self.records)

    def mean(self, metric: str) -> float | None:
        """Mean of `ttft`, `tpot` or `queue_time` over the requests that have it, in seconds."""
        values = [getattr(output.metrics, metric) for output in self.outputs]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None


def base_parser(milestone: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every demo has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {milestone}.demo", description=description, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="HF id, folder, GGUF file or tiny-llama")
    add("--prompts", nargs="+", metavar="TEXT", help="your own instead of the demo's")
    add(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="output tokens of every request, unless EOS comes before (default: the demo's own)",
    )
    add("--max-num-seqs", type=positive, default=8, metavar="N", help="rows of a step")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of sampling and of random arrivals")
    add("--trace", metavar="PATH.jsonl", help="write the trace there")
    add("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where the picture goes")
    return parser


def work_items(args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> list[WorkItem]:
    """The requests that the options describe; without a tokenizer, prompts of random token ids."""
    prompts: list[Any] = args.prompts or list(CLASSIC_PROMPTS)
    if tokenizer is None:
        rng = random.Random(args.seed)
        prompts = [[rng.randrange(vocab_size) for _ in prompt.split()] for prompt in prompts]
    params: dict[str, Any] = {"temperature": args.temperature}
    if args.temperature > 0:
        params["seed"] = args.seed
    if args.max_tokens is not None:
        params |= {"max_tokens": args.max_tokens, "ignore_eos": False}
    return classic(prompts, **params)


def is_chat_model(tokenizer: Any) -> bool:
    """Whether prompts are a user's messages."""
    return tokenizer is not None and bool(tokenizer.chat_template)


def serve_with_progress(engine: Any, items: Sequence[WorkItem], chat: bool, label: str) -> DemoRun:
    """Serve a workload behind a progress bar, which makes room for a trace on the console."""
    if engine.tracer is None:
        engine.tracer = Tracer()
    first = len(engine.tracer.records)
    total = sum(item.params.max_tokens * item.params.n for item in items)
    with progress_bar(is_hidden=prints_steps(engine)) as bar:
        task = bar.add_task(label, total=total, count="")
        num_tokens = 0

        def on_step(changed: list[RequestOutput]) -> None:
            nonlocal num_tokens
            num_tokens += len(changed)
            bar.update(task, completed=num_tokens, count=f"{num_tokens} of {total} tokens")

        outputs = serve(engine, items, chat=chat, on_step=on_step)
    return DemoRun(label, outputs, engine.tracer.records[first:])


def prints_steps(engine: Any) -> bool:
    """Whether the engine shows every step itself (`--trace console`, `LLM_TRACE=1`)."""
    return engine.tracer is not None and any(
        isinstance(getattr(sink, "console", None), Console) for sink in engine.tracer.sinks
    )


def print_trace(run: DemoRun, engine: Any) -> None:
    """The steps of a trace in which something happened, unless all have been shown."""
    if not prints_steps(engine):
        _headline(f"{run.label[:1].upper()}{run.label[1:]}, step by step")
        print_telling(run.records, console)


def print_answers(items: Sequence[WorkItem], outputs: Sequence[RequestOutput]) -> None:
    """Each prompt and what the model made of it."""
    _headline("Answers")
    for index, (item, output) in enumerate(zip(items, outputs, strict=True)):
        prompt = item.prompt if isinstance(item.prompt, str) else f"{len(item.prompt)} token ids"
        answer = output.text or " ".join(map(str, output.token_ids))
        counts = (
            f"{len(output.prompt_token_ids)} tokens in, {len(output.token_ids)} out, "
            f"ended by {output.finish_reason}"
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text, style in (
            (output.request_id, prompt, "bold"),
            ("", answer.strip(), ""),
            ("", counts, "dim"),
        ):
            grid.add_row(Text(name), Text(text, style))  # no markup: texts may hold [brackets]
        if index:
            console.print()
        console.print(grid)


def print_requests(runs: Sequence[DemoRun]) -> None:
    """Per request and run: when its first token came and when its last."""
    _headline("Requests, times in ms since each one's arrival")
    names = ["queue", "TTFT", "TPOT", "done"] if len(runs) == 1 else ["TTFT", "done"]
    names = names if len(runs) < 4 else ["done"]  # must fit 80 columns
    table = Table(box=None, header_style="bold")
    lead = "\n" if len(runs) > 1 else ""  # a line for the labels of the runs
    table.add_column(f"{lead}request", overflow="ellipsis", no_wrap=True)
    for name in (f"{lead}in", f"{lead}out"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        for name in names:
            label = run.label if len(runs) > 1 and name == names[0] else ""
            title = f"{label}\n{name}" if lead else name
            table.add_column(title, justify="right", no_wrap=True)
    for each in zip(*(run.outputs for run in runs), strict=True):
        cells = []
        for output in each:
            m = output.metrics
            done = None if m.finish_time is None else m.finish_time - m.arrival_time
            numbers = {"queue": m.queue_time, "TTFT": m.ttft, "TPOT": m.tpot, "done": done}
            cells += [milliseconds(numbers[name]) for name in names]
        first = each[0]
        sizes = str(len(first.prompt_token_ids)), str(len(first.token_ids))
        table.add_row(Text(first.request_id), *sizes, *cells)
    console.print(table)


def print_summary(runs: Sequence[DemoRun]) -> None:
    """The totals of each run, side by side."""
    _headline("Summary")
    table = Table(box=None, header_style="bold", show_header=len(runs) > 1)
    table.add_column("")
    for run in runs:
        table.add_column(run.label, justify="right")
    lines = {
        "steps": [f"{len(run.records):,}" for run in runs],
        "rows a step, on average": [f"{run.rows_per_step:.1f}" for run in runs],
        "useful share of computed positions": [f"{run.useful_share:.1%}" for run in runs],
        "output tokens": [f"{run.num_tokens:,}" for run in runs],
        "time": [f"{run.seconds:.2f} s" for run in runs],
        "output tokens per second": [f"{run.num_tokens / run.seconds:.1f}" for run in runs],
        "mean TTFT": [f"{milliseconds(run.mean('ttft'))} ms" for run in runs],
        "mean TPOT": [f"{milliseconds(run.mean('tpot'))} ms" for run in runs],
    }
    for name, cells in lines.items():
        table.add_row(name, *cells)
    console.print(table)


def write_timeline(runs: Sequence[DemoRun], path: Path) -> None:
    """Draw the traces on shared axes and say where the picture is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [[record.to_dict() for record in run.records] for run in runs]
    draw_timeline(plain, [run.label for run in runs], path)
    console.print()
    console.print(f"timeline: {path}", markup=False, soft_wrap=True)


def milliseconds(seconds: float | None) -> str:
    """Whole milliseconds from ten on, else one decimal."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.1f}" if seconds < 0.01 else f"{seconds * 1e3:,.0f}"


def _headline(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left", style="dim")
