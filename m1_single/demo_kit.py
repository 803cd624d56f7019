"""What the demos of all milestones share: options, serving with progress, and the closing report."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .checkpoint import DEFAULT_MODEL
from .request import RequestOutput
from .timeline import draw_timeline
from .trace_console import ConsoleSink, print_telling_records
from .tracer import StepRecord, Tracer
from .workloads import CLASSIC_PROMPTS, WorkItem, classic, serve

console = Console()


def base_parser(description: str) -> argparse.ArgumentParser:
    """The options that every demo has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="HF id, folder, GGUF or tiny-llama")
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help="your own prompts")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="output tokens of every request, then ended by EOS too (default: 10, 100 and 50)",
    )
    parser.add_argument("--max-num-seqs", type=int, default=8, help="rows of a step")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampled requests")
    parser.add_argument("--trace", metavar="PATH.jsonl", help="write the trace there")
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where plots go"
    )
    return parser


def work_items(args: argparse.Namespace, engine: Any) -> list[WorkItem]:
    """The requests that the options describe."""
    prompts: list[Any] = args.prompts or list(CLASSIC_PROMPTS)
    if engine.tokenizer is None:  # a model of random weights takes random token ids
        rng = random.Random(args.seed)
        prompts = [[rng.randrange(engine.vocab_size) for _ in prompt.split()] for prompt in prompts]
    params: dict[str, Any] = {"temperature": args.temperature}
    if args.temperature > 0:
        params["seed"] = args.seed
    if args.max_tokens is not None:
        params |= {"max_tokens": args.max_tokens, "ignore_eos": False}
    return classic(prompts, **params)


def run_demo(demo: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a demo's body; bad input and Ctrl-C end it with one line and an exit status."""
    try:
        demo(args)
    except KeyboardInterrupt:
        console.print("\nStopped. Unfinished requests were aborted.", style="bold")
        return 130
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        return 2
    return 0


def serve_with_progress(
    engine: Any, items: Sequence[WorkItem], chat: bool, label: str
) -> tuple[list[RequestOutput], list[StepRecord]]:
    """Serve a workload behind a progress bar.

    Returns:
        Final outputs in the order of `items`, and the trace of the run.
    """
    if engine.tracer is None:
        engine.tracer = Tracer()
    first = len(engine.tracer.records)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        total = sum(item.params.max_tokens * item.params.n for item in items)
        task = bar.add_task(label, total=total, tokens="")
        num_tokens = 0

        def on_step(outputs: list[RequestOutput]) -> None:
            nonlocal num_tokens
            num_tokens += len(outputs)
            bar.update(task, completed=num_tokens, tokens=f"{num_tokens} of {total} tokens")

        outputs = serve(engine, items, chat=chat, on_step=on_step)
    return outputs, engine.tracer.records[first:]


def print_answers(items: Sequence[WorkItem], outputs: Sequence[RequestOutput]) -> None:
    """Each prompt and what the model made of it."""
    for item, output in zip(items, outputs, strict=True):
        prompt = item.prompt if isinstance(item.prompt, str) else f"{len(item.prompt)} token ids"
        console.print()
        console.print(f"{output.request_id}  {prompt}", style="bold", highlight=False, markup=False)
        console.print(output.text or str(output.token_ids), highlight=False, markup=False)
        console.print(
            f"    [{len(output.prompt_token_ids)} tokens in, {len(output.token_ids)} out, "
            f"ended by {output.finish_reason}]",
            style="dim",
            highlight=False,
            markup=False,
        )


def print_trace(records: Sequence[StepRecord], title: str) -> None:
    """The steps of a trace in which something happened."""
    console.print()
    console.rule(title)
    print_telling_records(records, ConsoleSink(console))


def useful_share(records: Sequence[StepRecord]) -> float:
    """Share of computed positions that belonged to a request and not to padding."""
    useful = sum(record.num_prefill_tokens + record.num_decode_tokens for record in records)
    return useful / (useful + sum(record.num_padding_tokens for record in records))


def print_summary(records: Sequence[StepRecord], outputs: Sequence[RequestOutput]) -> None:
    """A line of totals, and per request how long it waited and how fast it went."""
    num_tokens = sum(len(output.token_ids) for output in outputs)
    start = min(output.metrics.arrival_time for output in outputs)
    seconds = max(output.metrics.finish_time or start for output in outputs) - start
    table = Table(title="Requests", title_justify="left", box=None, header_style="bold")
    for name in ("request", "in", "out", "queue ms", "TTFT ms", "TPOT ms", "done at ms"):
        table.add_column(name, justify="left" if name == "request" else "right")
    for output in outputs:
        m = output.metrics
        done_at = None if m.finish_time is None else m.finish_time - start
        table.add_row(
            output.request_id,
            str(len(output.prompt_token_ids)),
            str(len(output.token_ids)),
            *(_ms(value) for value in (m.queue_time, m.ttft, m.tpot, done_at)),
        )
    console.print()
    console.print(table)
    batch = statistics.mean(len(record.batch) for record in records)
    console.print(
        f"{len(records)} steps, {num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.1f} "
        f"tok/s); rows per step {batch:.1f} on average; useful share of computed positions "
        f"{useful_share(records):.1%}",
        highlight=False,
    )


def write_timeline(
    traces: Sequence[Sequence[StepRecord]], labels: Sequence[str], path: Path
) -> None:
    """Draw traces and say where the picture is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [[record.to_dict() for record in trace] for trace in traces]
    draw_timeline(plain, list(labels), path)
    console.print(f"timeline: {path}", highlight=False, soft_wrap=True)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def main_exit(demo: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Parse the command line, run, exit."""
    sys.exit(run_demo(demo, parser.parse_args()))
