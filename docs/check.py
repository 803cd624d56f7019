"""Three questions at the end of each chapter, and whether your answers are right.

    python docs/check.py m3           asks one after the other; Enter gives the answer away
    python docs/check.py m3 --list    only the questions

They stand in checks.txt, each with the expression that computes its answer: mostly a run of the
real engine on a tiny model, read off its trace. So an answer cannot be older than the code.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from milestone_llm.command.cli import console, ended_in_one_line  # noqa: E402
from milestone_llm.core.sampling_params import SamplingParams  # noqa: E402
from milestone_llm.lab.trace.positions import Positions  # noqa: E402
from milestone_llm.lab.walkthrough.guide import Look, read_look  # noqa: E402


@dataclass(frozen=True)
class Question:
    """What is asked, and the expression of its answer with the reason."""

    text: str
    look: Look


def read_checks(text: str) -> dict[str, list[Question]]:
    """The questions of each chapter, by its name.

    After a line `# m3` come paragraphs: a question in some lines, then a line of a guide,
    `p EXPRESSION == ANSWER  # REASON`.
    """
    checks: dict[str, list[Question]] = {}
    for part in text.split("\n# ")[1:]:
        chapter, _, body = part.partition("\n")
        paragraphs = [each for each in body.strip().split("\n\n") if each]
        checks[chapter] = [_question(each) for each in paragraphs]
    return checks


def _question(paragraph: str) -> Question:
    text, _, look = paragraph.partition("\np ")
    return Question(" ".join(text.split()), read_look("p " + " ".join(look.split("\n"))))


CHECKS = read_checks((ROOT / "docs" / "checks.txt").read_text(encoding="utf-8"))


def show(text: str = "", indent: str = "   ") -> None:
    """Print a paragraph, its first line indented."""
    lines = textwrap.fill(text, 80, initial_indent=indent, subsequent_indent="   ")
    console.print(lines, markup=False, soft_wrap=True)


def ask(questions: Sequence[Question]) -> int:
    """Ask, and say what is right; returns the number of right answers."""
    num_right = 0
    for number, question in enumerate(questions, start=1):
        show(f"{number}.", indent="")
        show(question.text)
        try:
            guess = input("   your answer: ").strip()
        except EOFError:
            guess = ""
            show()
        guess = re.sub(r"(?<=\d),(?=\d{3}\b)", "", guess)  # 12,288, as the pages write it
        is_right = bool(guess) and question.look.is_guessed(guess, globals())
        num_right += is_right
        value, _ = question.look.evaluate(globals())
        verdict = "Right" if is_right else "Not so" if guess else "The answer"
        show(f"{verdict}: {value}. {question.look.meaning}")
        show()
    return num_right


# -- what the expressions in checks.txt use --------------------------------------------------------


@functools.cache
def tiny_model() -> Any:
    """Random weights: what is computed, and when, depends on lengths alone."""
    from milestone_llm.models.checkpoint import load_model

    return load_model("tiny-llama", dtype="float32", device="cpu").model


def run(
    package: str, lengths: Sequence[tuple[int, int]], arrivals: Sequence[int] = (), **options: Any
) -> list[Any]:
    """The records of a run: requests r0, r1, ... with so many tokens in and out.

    Args:
        arrivals: the step before which each comes; all at the start if not given.
        options: fields of the engine's config; `prompts="same"` lets all begin alike.
    """
    from milestone_llm.lab.bench.workloads import WorkItem, serve

    is_same = options.pop("prompts", "") == "same"
    engine = importlib.import_module(package).LLMEngine(tiny_model(), trace="memory", **options)
    items = [
        WorkItem(
            [5 + (0 if is_same else index)] * num_in,
            SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True),
            arrival_step=arrival,
        )
        for index, ((num_in, num_out), arrival) in enumerate(
            zip(lengths, arrivals or [0] * len(lengths), strict=True)
        )
    ]
    serve(engine, items)
    return list(engine.tracer.records)


def positions(records: Sequence[Any]) -> Positions:
    """How many positions a run computed, and how many of them were needed."""
    counted = Positions()
    for record in records:
        counted.take(record)
    return counted


def rows_of(request_id: str, records: Sequence[Any]) -> list[Any]:
    """(step, row) of each step that computed a request."""
    return [
        (record.step, row)
        for record in records
        for row in record.batch
        if row.request_id == request_id
    ]


def events(kind: str, records: Sequence[Any]) -> list[Any]:
    """What happened to KV memory, of one kind."""
    return [event for record in records for event in record.events if event.type == kind]


def num_rows_until_stop(package: str, num_tokens: int) -> int:
    """Steps with a row for a request whose token `num_tokens` (from 1) ends it."""
    engine = importlib.import_module(package).LLMEngine(tiny_model(), trace="memory")
    free = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    last = engine.generate([[5, 9, 33]], free)[0].token_ids[-1]
    engine.tracer.records.clear()
    engine.generate([[5, 9, 33]], SamplingParams(temperature=0, stop_token_ids=[last]))
    return sum(len(record.batch) for record in engine.tracer.records)


def graph_for(num_rows: int) -> int:
    """Rows of the graph that a decode step of M5 replays, for `max_num_seqs=50`."""
    from m5_kernels.step_graphs import Buckets, StepShape

    bucket = Buckets(50, 8192).bucket_for(StepShape(num_rows, num_rows, num_rows, 0))
    assert bucket is not None
    return bucket.num_seqs


def limit(loads: Sequence[int], num_tokens: int) -> float:
    """Outstanding tokens above which a replica is clearly busier."""
    from milestone_llm.serving.replicas.router import BUSIER

    return BUSIER * sum(loads) / len(loads) + num_tokens


def chosen(loads: Sequence[int], cached: Sequence[int], num_tokens: int) -> int:
    """The replica with most of a beginning among those that are not clearly busier."""
    most = limit(loads, num_tokens)
    able = [number for number, load in enumerate(loads) if load <= most]
    return max(able, key=lambda number: cached[number])


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the questions of a chapter, or list them; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapter", choices=CHECKS)
    parser.add_argument("--list", action="store_true", help="only the questions")
    options = parser.parse_args(arguments)
    questions = CHECKS[options.chapter]

    def body() -> None:
        if options.list:
            for number, question in enumerate(questions, start=1):
                show(f"{number}. {question.text}", indent="")
        else:
            show(f"{ask(questions)} of {len(questions)} answers were right.", indent="")

    return ended_in_one_line(body)


if __name__ == "__main__":
    sys.exit(main())
