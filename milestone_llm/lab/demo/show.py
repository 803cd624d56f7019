"""The output of a demo after its runs, and the timeline that it draws."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from milestone_llm import how_to_install
from milestone_llm.consoles import console
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.explorer.kv_figures import kv_figures
from milestone_llm.lab.explorer.page import Run, write_page
from milestone_llm.lab.explorer.positions import useful_share
from milestone_llm.trace.console import print_changes
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import plural

from .work import DemoRun


def headline(text: str) -> None:
    """Print a heading."""
    console.print()
    console.rule(f"[bold]{text}", align="left", style="dim")


def steps(run: DemoRun) -> None:
    """Print the steps in which something changed, unless all steps have been printed."""
    if not run.prints_steps:
        headline(f"{run.label[:1].upper()}{run.label[1:]}, step by step")
        print_changes(run.records, run.sink)


def step(run: DemoRun, record: StepRecord, what: str) -> None:
    """Print one step, unless all steps have been printed."""
    headline(f"{what} (step {record.step})")
    if not run.prints_steps:
        run.sink(record)


def answers(run: DemoRun, prompts: Sequence[str] = ()) -> None:
    """Print each prompt (its own, or the one given here) and the model's answers."""
    headline("Answers")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for index, (item, output) in enumerate(zip(run.items, run.outputs, strict=True)):
        prompt = prompts[index] if prompts else item.prompt
        if not isinstance(prompt, str):
            prompt = plural(len(prompt), "token id")
        if index:
            grid.add_row("")
        grid.add_row(Text(output.request_id), Text(prompt, "bold"))
        num_in = plural(len(output.prompt_token_ids), "token")
        for each in output.outputs:
            name = f"{output.request_id}/{each.index}" if each.index else ""
            grid.add_row(Text(name), Text(each.text.strip() or " ".join(map(str, each.token_ids))))
            counts = f"{num_in} in, {len(each.token_ids)} out, ended by {each.finish_reason}"
            grid.add_row("", Text(counts, "dim"))
    console.print(grid)


def requests(runs: Sequence[DemoRun]) -> None:
    """Print for each request and run when its first and its last token came.

    `saved`: tokens of the prompt that the first run found in a prefix cache.
    """
    headline("Requests, times in ms since each one's arrival")
    by_number = {1: ["queue", "TTFT", "TPOT", "done"], 2: ["TTFT", "done"]}
    names = by_number.get(len(runs), ["done"])  # more columns do not fit
    columns = ["request", "in", "out"]
    if has_hits := any(out.metrics.num_cached_tokens for out in runs[0].outputs):
        columns.append("saved")
    for run in runs:  # several runs: headings have a line with their labels
        columns += [f"{run.label}\n{names[0]}", *names[1:]] if len(runs) > 1 else names
    if len(runs) > 1:
        columns = [name if "\n" in name else f"\n{name}" for name in columns]
    rows = []
    for each in zip(*(run.outputs for run in runs), strict=True):
        sizes = len(each[0].prompt_token_ids), len(each[0].token_ids)
        rows.append([each[0].request_id, *map(str, sizes)])
        rows[-1] += [str(each[0].metrics.num_cached_tokens or "-")] if has_hits else []
        for m in (output.metrics for output in each):
            done = None if m.finish_time is None else m.finish_time - m.arrival_time
            times = {"queue": m.queue_time, "TTFT": m.ttft, "TPOT": m.tpot, "done": done}
            rows[-1] += [milliseconds(times[name]) for name in names]
    console.print(table("", columns, rows))


def summary(runs: Sequence[DemoRun]) -> None:
    """Print the totals of each run in columns, and whether all runs gave the same tokens."""
    headline("Summary")
    columns = [_totals(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    if len(runs) > 1 and any(record.preempted for run in runs for record in run.records):
        figures = [kv_figures(run.records) for run in runs]
        for title in ("preemptions", "recomputed tokens", "swapped blocks"):
            name = f"num_{title.replace(' ', '_')}"
            rows.append([title, *(f"{each[name]:,}" for each in figures)])
    console.print(table("", ["", *(run.label for run in runs)], rows, len(runs) > 1))
    if len(runs) > 1:
        print_same_tokens(runs)


def ladder(runs: Sequence[DemoRun]) -> None:
    """Print the totals of each run in a row, and whether all runs gave the same tokens."""
    headline("Summary")
    columns = {
        "steps": "steps",
        "rows a step": "rows a step, on average",
        "useful": "useful share of computed positions",
        "time": "time",
        "tok/s": "output tokens per second",
        "TTFT": "mean TTFT",
    }
    rows = []
    for run in runs:
        totals = _totals(run)
        rows.append([run.label, *(totals[name] for name in columns.values())])
    console.print(table("", ["", *columns], rows))
    print_same_tokens(runs)


def print_same_tokens(runs: Sequence[DemoRun]) -> None:
    """Print whether all runs gave the same tokens."""
    *most, last = [run.label for run in runs]
    tokens = [[output.token_ids for output in run.outputs] for run in runs]
    is_same = all(each == tokens[0] for each in tokens)
    what = "the same tokens" if is_same else "other tokens: sums in another order round apart"
    console.print(f"\n{', '.join(most)} and {last} gave {what}.")


def in_fewer_bits(runs: Sequence[DemoRun]) -> None:
    """Print the answer of the last run, whose weights have fewer bits, and the speed of each
    run."""
    headline("The same weights in the few bits in which their file has them")
    *_, last = runs
    answer = last.outputs[0]
    console.print(f"{last.label}: {answer.text.strip()}")
    rates = [(run.label, _totals(run)["output tokens per second"]) for run in runs]
    console.print("\nTokens a second: " + ", ".join(f"{name} {rate}" for name, rate in rates))


def _totals(run: DemoRun) -> dict[str, str]:
    records, metrics = run.records, [output.metrics for output in run.outputs]
    num_tokens = sum(len(c.token_ids) for output in run.outputs for c in output.outputs)
    useful = useful_share(records)
    seconds = max(m.finish_time or 0 for m in metrics) - min(m.arrival_time for m in metrics)

    def mean(times: Iterable[float | None]) -> str:
        known = [time for time in times if time is not None]
        return f"{milliseconds(statistics.fmean(known) if known else None)} ms"

    return {
        "steps": f"{len(records):,}",
        "rows a step, on average": f"{statistics.fmean(len(r.batch) for r in records):.1f}",
        "useful share of computed positions": f"{useful:.1%}",
        "output tokens": f"{num_tokens:,}",
        "time": f"{seconds:.2f} s",
        "output tokens per second": f"{num_tokens / seconds:,.1f}",
        "mean TTFT": mean(m.ttft for m in metrics),
        "mean TPOT": mean(m.tpot for m in metrics),
    }


def timeline(runs: Sequence[DemoRun], path: Path, by: str = "step", label: str = "{}") -> None:
    """Draw the traces on shared axes, and print the picture's path."""
    console.print()

    def draw() -> None:
        from milestone_llm.lab.plots.timeline import draw_timeline

        traces = [run.records for run in runs]
        draw_timeline(traces, [label.format(run.label) for run in runs], path, by=by)

    picture("timeline", path, draw)


def picture(what: str, path: Path, draw: Callable[[], object]) -> None:
    """Draw a picture and print its path. Without matplotlib, print how to install it."""
    try:
        draw()
    except ModuleNotFoundError as error:
        console.print(f"no {what}: {how_to_install(error)}", markup=False, soft_wrap=True)
    else:
        written(what, path)


def page(runs: Sequence[DemoRun], path: Path | None) -> None:
    """Write the page that replays one or two runs, if a path is given, and print the path."""
    if path is not None:
        pages = [Run.of(run.label, run.engine, prompts=run.prompts) for run in runs[:2]]
        write_page(pages, path)
        written("page", path)


def written(what: str, path: Path) -> None:
    """Print the path of a file in one line, on a console of any width."""
    console.print(f"{what}: {path}", markup=False, soft_wrap=True)


def milliseconds(seconds: float | None) -> str:
    """Return a time in ms as text: whole from ten on, otherwise with one decimal."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.1f}" if seconds < 0.01 else f"{seconds * 1e3:,.0f}"
