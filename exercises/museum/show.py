"""The output for a visitor: traffic, trace, question, and later the card."""

from __future__ import annotations

import pkgutil
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from milestone_llm.consoles import console
from milestone_llm.trace.console import ConsoleSink
from milestone_llm.trace.text import plural, print_lines

from .exhibit import CONFIG, Arrival, Exhibit, Run
from .rooms import NAMES, ROOMS, SYMPTOMS, complaint

TITLES = ("correct", "suspect")
"""Titles of the runs of the milestone as it is, and with the change."""
PIPELINED = "With pipelined steps, queues and blocks in use are those after the next plan.\n"


def rooms() -> None:
    """Print all exhibits by room."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for room, names in ROOMS.items():
        grid.add_row("", Text(room, "bold"))
        for name in names:
            grid.add_row(str(NAMES.index(name) + 1), Text(SYMPTOMS[name]))
    say("In each engine one method was changed. What is wrong, if anything?\n", "bold")
    print_lines(console, grid)
    say("\nGo and see: python -m exercises.museum 3", "dim")


def traffic(name: str, exhibit: Exhibit) -> None:
    """Print the symptom, the requests, and the engine's configuration."""
    heading(name)
    requests = "; ".join(map(_arrival, exhibit.traffic))
    say(f"{complaint(name)}\n\n{exhibit.milestone}. {requests}.")
    config = {**CONFIG, **exhibit.config}
    others = [f"; {key}={value!r}" for key, value in config.items() if key not in CONFIG]
    say(
        f"Blocks of {config['block_size']} tokens, {config['kv_cache_tokens']} tokens in all; a "
        f"request has at most {config['max_model_len']} tokens, a step "
        f"{config['max_num_batched_tokens']} tokens and {config['max_num_seqs']} rows"
        f"{''.join(others)}. {exhibit.setting}\n"
    )


def heading(name: str) -> None:
    """Print number and symptom."""
    text = f"[bold]{NAMES.index(name) + 1}. {SYMPTOMS[name]}[/]"
    console.rule(text, align="left", style="dim")


def _arrival(each: Arrival) -> str:
    """Return a request in words."""
    params, prompt = each.params, " ".join(map(str, each.prompt[:9]))
    more = " …" if len(each.prompt) > 9 else ""
    before = f"prompt and answer of {each.after}, and " if each.after else ""
    text = f"{each.name}: {before}{plural(len(each.prompt), 'token')} ({prompt}{more})"
    text += f", wants {params.max_tokens}"
    text += f", temperature {params.temperature}" if params.temperature else ""
    text += f", stop token {params.stop_token_ids[0]}" if params.stop_token_ids else ""
    return text + (f", stop {params.stop[0]!r}" if params.stop else "")


def trace(exhibit: Exhibit, run: Run) -> None:
    """Print every step of the run in question, and the exception that ended it."""
    sink = ConsoleSink(console, show_times=False)
    for record in run.records:
        sink.print_step(record)
    if run.raised:
        say(run.raised, "bold red")
    if exhibit.config.get("async_scheduling"):
        say(PIPELINED, "dim")


def outcome(exhibit: Exhibit, healthy: Run, changed: Run) -> None:
    """Print which tokens are wrong, what the engine itself notices, and which switches help."""
    name = TITLES[1]
    for who, right in healthy.tokens.items():
        if (tokens := changed.tokens.get(who, [])) != right:
            got = " ".join(map(str, tokens)) or "nothing"
            say(f"{name}: {who} gets {got}; it should get {' '.join(map(str, right))}")
        text = changed.texts.get(who, "")
        if healthy.params[who].stop and text != healthy.texts[who]:
            say(f"{name}: {who} reads {text!r}, and not {healthy.texts[who]!r}")
    say(f"{name}: check_invariants=True says {changed.check or 'nothing'}")
    if changed.tokens == healthy.tokens:
        say(f"{name}: every request gets the tokens that it should get")
        before, after = _num_positions(healthy), _num_positions(changed)
        for who in (who for who in after if after[who] != before[who]):
            say(f"{name}: {after[who]} positions are computed for {who}, not {before[who]}")
    if not exhibit.is_false_alarm:
        tried = exhibit.switches(healthy.tokens)
        for word, is_right in (("right", True), ("as wrong", False)):
            names = [name for name in tried if tried[name] is is_right]
            if names:
                say(f"{TITLES[1]}: {word} with {', or with '.join(names)}")


def _num_positions(run: Run) -> Counter[str]:
    """Return how many positions were computed, by request."""
    counts: Counter[str] = Counter()
    for record in run.records:
        counts.update({row.request_id: row.num_new_tokens for row in record.batch})
    return counts


def question(exhibit: Exhibit) -> None:
    """Print the question, to think about before reading the card."""
    console.print()
    say(f"{exhibit.ask} {exhibit.card['question']}".strip(), "bold cyan")


def card(name: str, exhibit: Exhibit, suspect: Run) -> None:
    """Print the card. The test's name is not wrapped, so that it can be copied."""
    card = exhibit.card
    words = ("cause", "invariant", "fix", "seen", "threads")
    rows = {"found": finding(exhibit, suspect), **{word: card[word] for word in words}}
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    for word, text in {**rows, "code": _code(name, exhibit)}.items():
        grid.add_row(word, Text(text))
    console.print()
    console.rule("[bold]The card", align="left", style="dim")
    print_lines(console, grid)
    console.print(f"[bold]test[/]       {card['test']}", soft_wrap=True)


def _code(name: str, exhibit: Exhibit) -> str:
    """Return the place of the changed function, and of the function that it replaces."""
    right: Any = pkgutil.resolve_name(exhibit.place)
    path = Path(right.__code__.co_filename).relative_to(Path(__file__).parents[2])
    return (
        f"exercises/museum/{name}.py, {exhibit.broken.__name__}, in place of {path.as_posix()}, "
        f"{right.__qualname__}"
    )


def finding(exhibit: Exhibit, run: Run) -> str:
    """Return the first impossible thing, with its step. In a false alarm, it only looks
    impossible."""
    step, words = next(exhibit.invariant(run))
    return f"step {step}: {words}"


def say(text: str, style: str = "") -> None:
    """Print text wrapped to the console's width."""
    for part in text.split("\n"):
        print_lines(console, Text("\n".join(textwrap.wrap(part, console.width)), style))
