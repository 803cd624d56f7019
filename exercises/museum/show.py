"""What a visitor sees: the two runs side by side, the question, and later the card."""

from __future__ import annotations

import importlib
import textwrap
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from milestone_llm.command.cli import console
from milestone_llm.trace.console import ConsoleSink
from milestone_llm.trace.text import print_lines

from .exhibit import CONFIG, Arrival, Exhibit, Run
from .lines import lines, without_numbers
from .rooms import NAMES, ROOMS, SYMPTOMS, complaint

SAME = "the same"
TITLES = ("correct", "suspect")
"""Of both runs."""
HOW_TO_READ = (
    "A row: who, positions computed (of 18: it ends before the last of 18 known tokens) → tokens "
    "sampled, tokens found in the cache, [block table]. Then what happened, who waits and why, and "
    "the free blocks. * is not in this step of the other run, block ids aside."
)
PIPELINED = "With pipelined steps, free blocks and who waits are those after the next plan."


def rooms() -> None:
    """All exhibits, by room."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for room, names in ROOMS.items():
        grid.add_row("", Text(room, "bold"))
        for name in names:
            grid.add_row(str(NAMES.index(name) + 1), Text(SYMPTOMS[name]))
    say("In each engine one method was changed. What is wrong, if anything?\n", "bold")
    print_lines(console, grid)
    say("\nGo and see: python -m exercises.museum 3", "dim")


def traffic(name: str, exhibit: Exhibit) -> None:
    """The symptom, who asks for what, and of which engine."""
    heading(name)
    say(
        f"{complaint(name)}\n\n{exhibit.milestone}. "
        + "; ".join(_arrival(each) for each in exhibit.traffic)
        + "."
    )
    config = {**CONFIG, **exhibit.config}
    memory, budget = config["kv_cache_tokens"], config["max_num_batched_tokens"]
    others = [f"; {key}={value!r}" for key, value in config.items() if key not in CONFIG]
    say(
        f"Blocks of {config['block_size']} tokens, {memory} tokens in all; a request has at most "
        f"{config['max_model_len']} tokens, a step {budget} tokens and {config['max_num_seqs']} "
        f"rows{''.join(others)}. {exhibit.setting}\n"
    )


def heading(name: str, run: str = "") -> None:
    """Number and symptom, and of which run."""
    text = f"[bold]{NAMES.index(name) + 1}. {SYMPTOMS[name]}[/]" + (run and f": {run}")
    console.rule(text, align="left", style="dim")


def _arrival(each: Arrival) -> str:
    """A request in words."""
    params, prompt = each.params, " ".join(map(str, each.prompt[:9]))
    text = (
        f"{each.name}: {len(each.prompt)} tokens ({prompt}{' …' if len(each.prompt) > 9 else ''})"
    )
    if each.after:
        text = text.replace(": ", f": prompt and answer of {each.after}, and ")
    text += f", wants {params.max_tokens}"
    text += f", temperature {params.temperature}" if params.temperature else ""
    text += f", stop token {params.stop_token_ids[0]}" if params.stop_token_ids else ""
    return text + (f", stop {params.stop[0]!r}" if params.stop else "")


def side_by_side(exhibit: Exhibit, healthy: Run, broken: Run) -> None:
    """Every step of both runs; what is the same in both is not said twice."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for title, side in (("step", "right"), (TITLES[0], "left"), (TITLES[1], "left")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    runs = (lines(healthy), lines(broken))
    for step, (left, right) in enumerate(zip_longest(*runs, fillvalue=list[str]())):
        changed = Text(SAME, "dim") if left == right else _marked(right, left)
        table.add_row(str(step), _marked(left, right), changed)
    print_lines(console, table)
    legend = f"{HOW_TO_READ} {PIPELINED if exhibit.milestone == 'm5_kernels' else ''}"
    say(f"\n{legend.rstrip()}\n", "dim")


def _marked(own: list[str], other: list[str]) -> Text:
    """Lines, those in bold and with a star that the other run does not have in this step."""
    width = (console.width - len("step") - 4) // 2
    others, text = {without_numbers(line) for line in other}, Text()
    for line in own:
        is_new = without_numbers(line) not in others
        parts = textwrap.wrap(
            ("* " if is_new else "") + line,
            width,
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        text.append("\n".join(parts) + "\n", "bold yellow" if is_new else "")
    text.rstrip()
    return text


def outcome(exhibit: Exhibit, healthy: Run, changed: Run, alone: Run) -> None:
    """Whose tokens are wrong, what the engine itself notices, and which switch mends it."""
    for title, run in zip(TITLES, (healthy, changed), strict=True):
        wrong = [name for name, tokens in alone.tokens.items() if run.tokens.get(name) != tokens]
        for name in wrong:
            got = " ".join(map(str, run.tokens.get(name, []))) or "nothing"
            want = " ".join(map(str, alone.tokens[name]))
            say(f"{title}: {name} gets {got}; alone on M1 it gets {want}")
            if run.texts[name] != alone.texts[name] and alone.params[name].stop:
                say(f"{title}: {name} reads {run.texts[name]!r}, and not {alone.texts[name]!r}")
        if not wrong:
            say(f"{title}: every request gets the tokens that it gets alone on M1")
        if run.raised:
            say(f"{title}: {run.raised}", "bold red")
        say(f"{title}: check_invariants=True says {run.check or 'nothing'}")
    if changed.tokens == alone.tokens:
        before, after = _num_positions(healthy), _num_positions(changed)
        for name in (name for name in after if after[name] != before[name]):
            counts = f"{before[name]} ({TITLES[0]}), {after[name]} ({TITLES[1]})"
            say(f"positions computed for {name}: {counts}")
    if not exhibit.is_false_alarm:
        tried = exhibit.switches(alone.tokens)
        for word, is_right in (("right", True), ("as wrong", False)):
            names = [name for name in tried if tried[name] is is_right]
            if names:
                say(f"{TITLES[1]}: {word} with {', or with '.join(names)}")


def _num_positions(run: Run) -> Counter[str]:
    """How many positions were computed, by request."""
    counts: Counter[str] = Counter()
    for record in run.records:
        counts.update({row.request_id: row.num_new_tokens for row in record.batch})
    return counts


def question(exhibit: Exhibit) -> None:
    """What to think about before the card is read."""
    console.print()
    say(f"{exhibit.ask} {exhibit.card['question']}".strip(), "bold cyan")


def card(name: str, exhibit: Exhibit, suspect: Run) -> None:
    """What it was. The test is not wrapped, so that it can be copied."""
    card = exhibit.card
    words = ("cause", "invariant", "fix", "seen", "threads")
    rows = {"the line": line_in_question(exhibit, suspect), **{word: card[word] for word in words}}
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    for word, text in {**rows, "code": _code(name, exhibit)}.items():
        grid.add_row(word, Text(text))
    console.print()
    console.rule("[bold]The card", align="left", style="dim")
    print_lines(console, grid)
    console.print(f"[bold]test[/]       {card['test']}", soft_wrap=True)


def _code(name: str, exhibit: Exhibit) -> str:
    """Where the changed function is, and the one in whose place it stands."""
    module, _, attribute = exhibit.place.rpartition(".")
    own: Any = exhibit.broken
    right = getattr(importlib.import_module(module), attribute)
    if isinstance(own, type):
        (base,) = own.__bases__
        method = next(n for n, v in vars(own).items() if callable(v) and hasattr(base, n))
        own, right = getattr(own, method), getattr(base, method)
    path = Path(right.__code__.co_filename).relative_to(Path(__file__).parents[2])
    return (
        f"exercises/museum/{name}.py, {own.__qualname__}, in place of {path.as_posix()}, "
        f"{right.__qualname__}"
    )


def line_in_question(exhibit: Exhibit, run: Run) -> str:
    """The first line that cannot be (of a false alarm: that looks so), with its step."""
    step, words = next(exhibit.invariant(run))
    line = next(line for line in lines(run)[step] if line.startswith(words))
    return f"step {step}: {line}"


def trace(name: str, exhibit: Exhibit, run: Run) -> None:
    """Every step of one run, whole, and the exception that ended it."""
    heading(name, TITLES[1])
    sink = ConsoleSink(console, show_times=False)
    for record in run.records:
        sink.print_step(record)
    if run.raised:
        say(run.raised, "bold red")


def say(text: str, style: str = "") -> None:
    """Text wrapped to the console's width."""
    for part in text.split("\n"):
        print_lines(console, Text("\n".join(textwrap.wrap(part, console.width)), style))
