"""Measure servers under agents: many turns, long beginnings, pauses for tools.

Each agent is a closed loop. It sends its conversation, waits for the answer, "thinks" for a random
time, and sends all of it again with a result. One heavy user runs many agents at once, the others
one each. All have a key of their own. An agent that is refused comes back after `Retry-After`.

    python -m milestone_llm.lab.bench.agents --replicas 2 -- --max-num-seqs 8 --max-queued 32

The servers are M4's, with and without the prefix cache, and with replicas if that is asked for.
Their steps wait instead of computing (`milestone_llm.serving.timed`), so that the answers' tokens
are known and the next prompt can repeat them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from milestone_llm.cli import Formatter, above_0, add_options, at_least_0, positive, run_command

from .open_loop import TOKEN_IDS, open_request
from .running_server import running_server, server_command

COLUMNS = {
    "refused": "{refused:,.0f}",
    "prompt\ntokens": "{prompt_tokens:,.0f}",
    "computed": "{computed_tokens:,.0f}",
    **{
        f"{turn}\np{percent}": f"{{{turn}_p{percent}:,.0f}}"
        for turn in ("first", "later")
        for percent in (50, 95)
    },
}
"""Columns, and the format of their figures. A row is a server and a kind of user."""

TOKEN_ID = 40
"""The token of all answers, as in `milestone_llm.serving.timed`."""


@dataclass
class Turn:
    """What became of one turn."""

    is_first: bool
    ttft: float = 0.0
    """Seconds from the first attempt to the first token."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_refusals: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.lab.bench.agents",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--light", type=positive, default=10, metavar="N", help="users with one agent each")
    add("--heavy", type=positive, default=10, metavar="N", help="agents of the heavy user")
    add("--turns", type=positive, default=5, metavar="N", help="of each agent")
    add("--think", type=at_least_0, default=1.0, metavar="S", help="mean seconds between turns")
    about = "tokens of the system prompt and the functions, which differ from user to user"
    add("--prefix-len", type=positive, default=1024, metavar="N", help=about)
    add("--result-len", type=positive, default=64, metavar="N", help="tokens that a tool adds")
    add("--answer-len", type=positive, default=32, metavar="N", help="tokens of an answer")
    add("--step-ms", type=above_0, default=20.0, metavar="MS", help="that a step waits")
    add("--token-ms", type=at_least_0, default=0.2, metavar="MS", help="and for each position")
    add("--replicas", type=positive, metavar="N", help="measure so many replicas, too")
    add_options(parser, "seed", "markdown")
    add("server", nargs="*", metavar="-- OPTION", help="options of the servers' command line")
    args = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments

    def recorded(args: argparse.Namespace) -> None:
        from .record import made_by

        measure(args, made_by(["python", "-m", "milestone_llm.lab.bench.agents", *words]))

    return run_command(recorded, args)


def measure(args: argparse.Namespace, record: dict[str, str]) -> None:
    """Measure the servers, print the results, and write them to the file of the option.

    Raises:
        InputError: a server does not start.
    """
    from milestone_llm.consoles import console

    from .record import front_matter
    from .report import cell, markdown, print_report

    users = ["heavy"] * args.heavy + [f"light{place}" for place in range(args.light)]
    keys = ["--api-key", *dict.fromkeys(users)]
    command = [*server_command("m4_prefix_chunked", args.step_ms, args.token_ms), *keys]
    variants = {"with cache": [], "without": ["--no-enable-prefix-caching"]}
    if args.replicas:
        variants[f"{args.replicas} replicas"] = ["--replicas", str(args.replicas)]
    rows: dict[str, list[str]] = {}
    for name, options in variants.items():
        with running_server([*command, *options, *args.server]) as url:
            turns = asyncio.run(run_agents(url, users, args))
        for kind in ("heavy", "light"):
            of_kind = [each for user, each in turns if user.startswith(kind)]
            figures = dict(figures_of(of_kind))
            rows[f"{name}, {kind}"] = [cell(text, figures) for text in COLUMNS.values()]
    about = {
        "workload": f"{args.turns} turns of each agent, {args.light} light users and a heavy one "
        f"with {args.heavy} agents, seed {args.seed}",
        "lengths": f"{args.prefix_len} tokens at the beginning, {args.answer_len} of an answer, "
        f"{args.result_len} of a result; {args.think:g} s between turns on average",
    }
    tables = [("What was computed, and TTFT of first and later turns, in ms", list(COLUMNS), rows)]
    print_report(console, tables, [])
    if args.markdown:
        text = front_matter(record) + markdown(about, tables, [])
        args.markdown.write_text(text, encoding="utf-8")


async def run_agents(
    url: str, users: Sequence[str], args: argparse.Namespace
) -> list[tuple[str, Turn]]:
    """Run an agent for each of the users. Returns the user and the result of each turn."""

    async def follow(number: int, user: str) -> list[tuple[str, Turn]]:
        chance, shared = random.Random(f"{args.seed} {number}"), random.Random(user)
        prompt = [shared.randrange(3, TOKEN_IDS) for _ in range(args.prefix_len)]
        turns = []
        for place in range(args.turns):
            await asyncio.sleep(chance.expovariate(1 / args.think) if args.think else 0.0)
            prompt += [chance.randrange(3, TOKEN_IDS) for _ in range(args.result_len)]
            turns.append((user, await ask(url, user, prompt, args.answer_len, place == 0)))
            prompt += [TOKEN_ID] * args.answer_len
        return turns

    lists = await asyncio.gather(*(follow(*each) for each in enumerate(users)))
    return [turn for turns in lists for turn in turns]


async def ask(url: str, key: str, prompt: list[int], max_tokens: int, is_first: bool) -> Turn:
    """Send a turn until it is admitted, and read its answer.

    Raises:
        ValueError: the server answers with another status than 200 and 429.
    """
    turn, start = Turn(is_first), time.perf_counter()
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    while True:
        reader, writer = await open_request(url, body, {"Authorization": f"Bearer {key}"})
        try:
            found = re.match(rb"HTTP/1.1 (\d+)", await reader.readline())
            status, retry_after = int(found[1]) if found else 0, 1.0
            async for line in reader:
                if said := re.match(rb"(?i)retry-after: (\d+)", line):
                    retry_after = float(said[1])
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("choices") and not turn.ttft:
                        turn.ttft = time.perf_counter() - start
                    if usage := event.get("usage"):
                        turn.num_prompt_tokens = usage["prompt_tokens"]
                        turn.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        finally:
            writer.close()
        if status == 200:
            return turn
        if status != 429:
            raise ValueError(f"status {status} for a turn of {key}")
        turn.num_refusals += 1
        await asyncio.sleep(retry_after)


def figures_of(turns: Sequence[Turn]) -> Iterator[tuple[str, float]]:
    """Yield the figures of some turns by name: times in ms."""
    from .measure import percentile

    yield "refused", sum(turn.num_refusals for turn in turns)
    num_prompt_tokens = sum(turn.num_prompt_tokens for turn in turns)
    yield "prompt_tokens", num_prompt_tokens
    yield "computed_tokens", num_prompt_tokens - sum(turn.num_cached_tokens for turn in turns)
    for name, is_first in (("first", True), ("later", False)):
        times = [1e3 * turn.ttft for turn in turns if turn.is_first is is_first]
        for percent in (50, 95) if times else ():
            yield f"{name}_p{percent}", percentile(times, percent)


if __name__ == "__main__":
    sys.exit(main())
