"""The work of a demo: a model, requests for it, and the runs that serve them."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import cycle
from typing import Any

from rich.console import Console

from milestone_llm.cli import OPTIONS
from milestone_llm.consoles import console, log_console
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.inputs import encode_prompt
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lab.bench.workloads import (
    CLASSIC_LENGTHS,
    CLASSIC_PROMPTS,
    WorkItem,
    serve,
    token_count,
)
from milestone_llm.models.checkpoint import LoadedModel, load_model, max_position
from milestone_llm.models.threads import slowness
from milestone_llm.trace.console import ConsoleSink
from milestone_llm.trace.records import StepRecord


@dataclass
class DemoRun:
    """Requests that an engine has served, and their outputs."""

    label: str
    engine: Any
    items: list[WorkItem]
    outputs: list[RequestOutput]
    """One for each item."""

    @property
    def records(self) -> list[StepRecord]:
        """Records of its steps."""
        return list(self.engine.tracer.records)

    @cached_property
    def sink(self) -> ConsoleSink:
        """Prints its steps. There is one for all, so that a request keeps its colour."""
        tokenizer = self.engine.tokenizer
        return ConsoleSink(console, decode=tokenizer and tokenizer.decode)

    @property
    def prompts(self) -> dict[str, str]:
        """Texts of prompts, by request id. A model without a tokenizer has none."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            return {}
        pairs = zip(self.outputs, self.items, strict=True)
        return {
            each.request_id: item.prompt
            if isinstance(item.prompt, str)
            else tokenizer.decode(each.prompt_token_ids, skip_special_tokens=True)
            for each, item in pairs
        }

    @property
    def prints_steps(self) -> bool:
        """Whether the engine printed every step (`--trace console`, `MILESTONE_LLM_TRACE=1`)."""
        sinks = self.engine.tracer.sinks
        return any(isinstance(getattr(sink, "console", None), Console) for sink in sinks)


@dataclass
class Work:
    """A model and its requests; `args` are the options of the demo."""

    args: argparse.Namespace
    loaded: LoadedModel
    items: list[WorkItem]

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages of a user."""
        return bool(getattr(self.loaded.tokenizer, "chat_template", None))

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        tokenizer = self.loaded.tokenizer
        return [len(encode_prompt(tokenizer, item.prompt, self.is_chat)) for item in self.items]

    def _say_how_long(self) -> None:
        """Print once how long the demo takes, if that is known."""
        seconds, self.args.seconds = self.args.seconds, 0
        is_on_cpu = self.loaded.model.device.type == "cpu"
        if seconds and is_on_cpu and self.args.model == OPTIONS["model"]["default"]:
            seconds *= max(1.0, slowness())
            log_console.print(f"About {5 * max(1, round(seconds / 5))} s.", style="dim")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, but not more than the model has positions for."""
        pairs = zip(self.prompt_lengths, self.items, strict=True)
        longest = max(length + item.params.max_tokens for length, item in pairs)
        return min(longest, max_position(self.loaded.model) or longest)

    def engine(self, milestone: Any, **changes: Any) -> Any:
        """Build an engine of a milestone's package, with a tracer.

        Every option with the name of a field in its config is passed on; `changes` override it. If
        `changes` has `model`, that is used instead of the loaded model.
        """
        model = changes.pop("model", self.loaded.model)
        names = [field.name for field in fields(milestone.EngineConfig)]
        options = {name: getattr(self.args, name, None) for name in names} | changes
        default = milestone.EngineConfig.max_num_batched_tokens
        # holds every prompt, and all rows
        budget = max(default, self.longest, self.args.max_num_seqs)
        given = {"trace": "memory", "max_num_batched_tokens": budget}
        given |= {name: value for name, value in options.items() if value is not None}
        return milestone.LLMEngine(model, tokenizer=self.loaded.tokenizer, **given)

    def run(self, label: str, milestone: Any, **changes: Any) -> DemoRun:
        """Serve the requests with an engine of a milestone's package."""
        return self.serve(label, self.engine(milestone, **changes))

    def beside_own(self, label: str, milestone: Any, **changes: Any) -> list[DemoRun]:
        """Run the milestone's own scheduler, to be compared, if `--scheduler` gives another one."""
        if not self.args.scheduler:
            return []
        return [self.run(label, milestone, scheduler=None, trace=None, **changes)]

    def serve(self, label: str, engine: Any) -> DemoRun:
        """Serve the requests. Their tokens are counted on the console, unless a trace prints
        there."""
        run = DemoRun(label, engine, self.items, [])
        total = sum(item.params.max_tokens * item.params.n for item in self.items)
        newest = [""]

        def on_step(outputs: Sequence[RequestOutput]) -> None:
            if outputs:
                newest[0] = outputs[-1].text
            progress(len(outputs))

        self._say_how_long()
        with token_count(label, total, run.prints_steps, lambda: newest[0]) as progress:
            run.outputs = serve(engine, self.items, chat=self.is_chat, on_step=on_step)
        return run


def load_work(
    args: argparse.Namespace,
    prompts: Sequence[str] = CLASSIC_PROMPTS,
    lengths: Sequence[int] = CLASSIC_LENGTHS,
    **params: Any,
) -> Work:
    """Load the model, and make the requests that the options describe. EOS ends a text.

    Args:
        prompts: used unless `--prompts` gives others. Without a tokenizer, random tokens replace
            their words.
        lengths: output tokens of each, unless `--max-tokens` is given.
        params: further fields of `SamplingParams`.
    """
    loaded = load_model(args.model)
    texts: Sequence[Any] = args.prompts or prompts
    if loaded.tokenizer is None:
        rng = random.Random(args.seed)
        texts = [[rng.randrange(loaded.vocab_size) for _ in text.split()] for text in texts]
    has_words = loaded.tokenizer is not None  # random tokens have no end
    params = {
        "temperature": args.temperature,
        "ignore_eos": not has_words and args.max_tokens is None,
    } | params
    if args.temperature > 0:
        params["seed"] = args.seed
    lengths = [args.max_tokens] if args.max_tokens else lengths
    pairs = zip(texts, cycle(lengths), strict=False)
    items = [WorkItem(text, SamplingParams(max_tokens=length, **params)) for text, length in pairs]
    return Work(args, loaded, items)
