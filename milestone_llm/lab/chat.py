"""A conversation in the terminal: `python -m milestone_llm.lab.chat`

Each turn sends the whole conversation again, as a client of a server does. Under an answer is what
the prefix cache found of it. To see more:

  --set enable_prefix_caching=false     each turn computes the whole conversation
  --set block_size=64                   only full blocks are found
  --milestone m4                        Hugging Face's modules in place of M5's decoder

Ctrl-C ends an answer. Ctrl-D, or Ctrl-C at `you>`, ends the conversation; /new begins another one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from milestone_llm import MILESTONES
from milestone_llm.cli import (
    Formatter,
    add_options,
    config_fields,
    positive,
    run_command,
    say_that_it_loads,
)
from milestone_llm.core.errors import InputError

WITH_CACHE = {name[:2]: name for name in MILESTONES[3:]}
"""Milestones that have a prefix cache."""


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.lab.chat", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--milestone", choices=WITH_CACHE, default="m5", help="whose engine answers")
    add_options(parser, "model")
    add("--system", metavar="TEXT", help="what the conversation begins with")
    add("--max-tokens", type=positive, default=256, metavar="N", help="most tokens of an answer")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    meaning = "most tokens of a conversation"
    add("--max-model-len", type=positive, default=2048, metavar="N", help=meaning)
    add_options(parser, "seed", "threads", "trace", "set")
    return parser


def chat(args: argparse.Namespace) -> None:
    """Answer line after line, until the input ends."""
    from milestone_llm.consoles import console, log_console
    from milestone_llm.core.sampling_params import SamplingParams
    from milestone_llm.trace.text import plural

    from .answer import print_answer

    params = SamplingParams(args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    fields = {"max_model_len": args.max_model_len, "trace": args.trace, **config_fields(args.set)}
    engine = importlib.import_module(WITH_CACHE[args.milestone]).LLMEngine(args.model, **fields)
    if not getattr(engine.tokenizer, "chat_template", None):
        raise InputError(f"{args.model} has no chat template, and so no conversations")
    engine.warm_up()  # otherwise the first turn's TTFT would have that work in it
    console.print(f"{engine.milestone} with {engine.model_name}. /new begins anew, Ctrl-D ends.")
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(system)
    while (text := read_line()) is not None:
        asked = {"role": "user", "content": text}
        if text == "/new":
            messages = list(system)
        elif text.startswith("/") and text[1:].isalpha():
            log_console.print(f"no command {text}: /new begins anew, Ctrl-D ends", markup=False)
        elif text:
            try:
                output = print_answer(engine, [*messages, asked], params)
            except InputError as error:
                log_console.print(f"error: {error}. /new begins another conversation", markup=False)
                continue
            if output is not None:
                messages += [asked, {"role": "assistant", "content": output.text}]
    counts = engine.stats()["prefix_cache"]
    saved, queried = counts["saved_tokens"], plural(counts["queried_tokens"], "prompt token")
    console.print(f"{saved:,} of {queried} came from the prefix cache.")


def read_line() -> str | None:
    """Return the next line of the input without the spaces around it; None at the input's end or
    Ctrl-C."""
    from milestone_llm.consoles import console

    try:
        text = console.input("\n[bold]you>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    if not sys.stdin.isatty():  # a terminal shows what is typed
        console.print(text, markup=False, soft_wrap=True)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(chat, parser().parse_args(arguments), say_that_it_loads)


if __name__ == "__main__":
    sys.exit(main())
