"""What a visitor sees: the two runs side by side, the question, and later the card."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from rich.table import Table
from rich.text import Text

from milestone_llm.lab.cli import console
from milestone_llm.lab.trace.console import ConsoleSink
from milestone_llm.lab.trace.text import print_lines

from .exhibit import CONFIG, Arrival, Exhibit, Run
from .lines import lines
from .rooms import NAMES, ROOMS, SYMPTOMS, complaint

SAME = "the same"
TITLES = {False: ("as it is", "with a bug"), True: ("as it is", "with a change that looks safer")}
"""Of both runs; True: of a false alarm."""
HOW_TO_READ = (
    "A row: who, positions computed → token sampled, tokens found in the cache, [block table]. "
    "Then what happened, who waits and why, and the free blocks. * is not in the other run."
)


def rooms() -> None:
    """All exhibits, by room."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for room, names in ROOMS.items():
        grid.add_row("", Text(room, "bold"))
        for name in names:
            grid.add_row(str(NAMES.index(name) + 1), Text(SYMPTOMS[name]))
    console.print("In each engine one method is wrong. What is it?\n", style="bold")
    print_lines(console, grid)
    say("\nGo and see: python -m exercises.museum 3", "dim")


def traffic(name: str, exhibit: Exhibit) -> None:
    """The symptom, and who asks for what."""
    number = NAMES.index(name) + 1
    console.rule(f"[bold]{number}. {SYMPTOMS[name]}", align="left", style="dim")
    say(
        f"{complaint(name)}\n\n{exhibit.milestone}. "
        + "; ".join(_arrival(each) for each in exhibit.traffic)
        + "."
    )
    config = {**CONFIG, **exhibit.config}
    memory, budget = config["kv_cache_tokens"], config["max_num_batched_tokens"]
    say(
        f"Blocks of {config['block_size']} tokens, {memory} tokens in all; a step has at most "
        f"{budget} tokens and {config['max_num_seqs']} rows.\n"
    )


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
    left_title, right_title = TITLES[exhibit.is_false_alarm]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column(left_title, ratio=1)
    table.add_column(right_title, ratio=1)
    runs = ([lines(record) for record in run.records] for run in (healthy, broken))
    for step, (left, right) in enumerate(zip_longest(*runs, fillvalue=list[str]())):
        if left == right:
            table.add_row(str(step), "\n".join(left), Text(SAME, "dim"))
        else:
            table.add_row(str(step), _marked(left, right), _marked(right, left))
    print_lines(console, table)
    say(f"\n{HOW_TO_READ}\n", "dim")


def _marked(own: list[str], other: list[str]) -> Text:
    """Lines, those in bold and with a star that the other run does not have in this step."""
    text = Text()
    for line in own:
        is_new = line not in other
        text.append(("* " if is_new else "") + line + "\n", "bold yellow" if is_new else "")
    text.rstrip()
    return text


def outcome(exhibit: Exhibit, healthy: Run, changed: Run, alone: Run) -> None:
    """Whose tokens are wrong, what the engine itself notices, and which switch mends it."""
    for title, run in zip(TITLES[exhibit.is_false_alarm], (healthy, changed), strict=True):
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
    if not exhibit.is_false_alarm:
        names = exhibit.right_with(alone.tokens)
        say(f"with a bug: right with {', or with '.join(names) or 'none of the switches'}")


def question(exhibit: Exhibit) -> None:
    """What to think about before the card is read."""
    alarm = "Which line looks wrong, and is it?"
    ask = alarm if exhibit.is_false_alarm else "Which line of this trace is impossible?"
    console.print()
    say(f"{ask} {exhibit.card['question']}", "bold cyan")


def card(name: str, exhibit: Exhibit, suspect: Run) -> None:
    """What it was."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("the line", line_in_question(exhibit, suspect))
    for word, text in exhibit.card.items():
        if word != "question":
            grid.add_row(word, Text(text))
    grid.add_row("code", f"exercises/museum/{name}.py, in place of {exhibit.place}")
    console.print()
    console.rule("[bold]The card", align="left", style="dim")
    print_lines(console, grid)


def line_in_question(exhibit: Exhibit, run: Run) -> str:
    """The first line that cannot be (of a false alarm: that looks so), with its step."""
    step, words = next(exhibit.invariant(run))
    line = next(line for line in lines(run.records[step]) if line.startswith(words))
    return f"step {step}: {line}"


def trace(run: Run) -> None:
    """Every step of one run, whole."""
    sink = ConsoleSink(console, show_times=False)
    for record in run.records:
        sink(record)


def say(text: str, style: str = "") -> None:
    """Text wrapped to the console's width."""
    for part in text.split("\n"):
        print_lines(console, Text("\n".join(textwrap.wrap(part, console.width)), style))
