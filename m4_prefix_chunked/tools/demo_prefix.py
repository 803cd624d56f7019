"""Part 1 of the demo: eight prompts with one beginning, cached and not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import m4_prefix_chunked
from milestone_llm.consoles import console
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.lab.demo import show
from milestone_llm.lab.demo.work import Work
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import plural

from .demo_texts import QUESTIONS, SYSTEM_PROMPT, chat_prompt
from .prefix_tree import Node, pool_in_words, prefix_tree, print_prefix_tree


def shared_prefix(args: argparse.Namespace, loaded: LoadedModel, picture: Path) -> None:
    """Serve prompts with one beginning, cached and not; show who paid and what the cache holds."""
    questions = args.prompts or list(QUESTIONS)
    work = Work(args, loaded, requests(args, loaded, questions))
    changes: dict[str, Any] = {"max_model_len": work.longest, "max_num_batched_tokens": None}
    engine = work.engine(m4_prefix_chunked, **changes)
    keeper = TreeKeeper(engine)
    engine.tracer.sinks.append(keeper)
    runs = work.beside_own("cached", m4_prefix_chunked, **changes)
    cached = work.serve("yours" if runs else "cached", engine)
    runs.append(cached)
    if not args.scheduler:
        changes |= {"enable_prefix_caching": False, "trace": None}
        runs.append(work.run("not cached", m4_prefix_chunked, **changes))
    show.step(cached, cached.records[0], "The first request pays")
    hits = (r for r in cached.records if any(row.num_cached_tokens for row in r.batch))
    if (hit := next(hits, None)) is not None:
        show.step(cached, hit, "Another one finds its beginning in the cache")
    show.requests(runs)
    show.headline(f"The prefix cache after step {keeper.step}, as a tree")
    decode = loaded.tokenizer and loaded.tokenizer.decode
    print_prefix_tree(keeper.roots, keeper.pool, console, decode)
    show.answers(cached, questions)
    show.summary(runs)
    print_counts(engine.stats()["prefix_cache"])
    show.timeline(runs, picture, by="positions")  # what a step computes is its width
    show.page(runs, args.explore)


def requests(args: argparse.Namespace, loaded: LoadedModel, questions: list[str]) -> list[WorkItem]:
    """Return a request for each question, some steps apart; prompts are token ids."""
    items = []
    for index, question in enumerate(questions):
        params: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        if args.temperature > 0:
            params["seed"] = args.seed + index
        prompt = chat_prompt(loaded, question, args.system_prompt or SYSTEM_PROMPT, args.seed)
        items.append(WorkItem(prompt, SamplingParams(**params), arrival_step=index * args.spacing))
    return items


class TreeKeeper:
    """A trace sink that keeps the prefix tree as it is after the latest admission."""

    roots: list[Node]
    pool: str
    step: int

    def __init__(self, engine: Any) -> None:
        self.scheduler, self.requests = engine.scheduler, dict[str, Request]()

    def __call__(self, record: StepRecord) -> None:
        """Take note of one step."""
        self.requests |= {request.request_id: request for request in self.scheduler.running}
        if record.admitted:
            cache, self.step = self.scheduler.kv.prefix_cache, record.step
            self.roots, self.pool = prefix_tree(cache, self.requests.values()), pool_in_words(cache)


def print_counts(counts: dict[str, Any]) -> None:
    """Print the counts of the cache."""
    console.print(
        f"\nprefix cache: {counts['hits']} of {plural(counts['queries'], 'request')} hit, "
        f"{counts['saved_tokens']:,} of {counts['queried_tokens']:,} prompt tokens saved "
        f"({counts['hit_rate']:.1%}), {counts['evictions']} evictions"
    )
