"""Part 3 of the demo: a request that repeats its prompt, with draft tokens and without."""

from __future__ import annotations

import argparse
from pathlib import Path

import m4_prefix_chunked
from milestone_llm.consoles import console
from milestone_llm.lab.bench.workloads import WorkItem, exactly
from milestone_llm.lab.demo import show
from milestone_llm.lab.demo.work import Work
from milestone_llm.models.checkpoint import LoadedModel

from .demo_texts import TALKS, chat_prompt

CODE = """\
Here is a Python file:

def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth

def perimeter(width, height):
    return 2 * (width + height)

Write the same file again, with the name width changed to w everywhere."""


def guesses(args: argparse.Namespace, loaded: LoadedModel, picture: Path) -> None:
    """Serve a request that repeats and one that does not, one after the other."""
    params = exactly(3 * args.max_tokens)
    prompts = [chat_prompt(loaded, text, seed=seed) for seed, text in enumerate((CODE, TALKS[0]))]
    work = Work(args, loaded, [WorkItem(prompt, params) for prompt in prompts])
    args.max_model_len, args.max_num_seqs = work.longest, 1
    runs = [
        work.run("guesses", m4_prefix_chunked, speculation="ngram"),
        work.run("no guesses", m4_prefix_chunked, trace=None),
    ]
    rows = [(record, row) for record in runs[0].records for row in record.batch]
    if hit := next((record for record, row in rows if row.num_accepted_tokens), None):
        show.step(runs[0], hit, "Guesses come true")
    show.headline("What guesses brought")
    lines = []
    for name, what in (("r0", "code, changed a little"), ("r1", "a description")):
        own = [row for _, row in rows if row.request_id == name]
        num_guesses = sum(row.num_draft_tokens for row in own)
        num_accepted = sum(row.num_accepted_tokens for row in own)
        numbers = params.max_tokens, len(own), num_guesses, num_accepted
        lines.append([name, what, *map(str, numbers)])
    heads = ["request", "text", "tokens", "steps", "guessed", "came true"]
    console.print(show.table("", heads, lines))
    show.summary(runs)
    show.timeline(runs, picture)
