"""What an exhibit is, and how it runs: the same traffic on an engine as it is and on a broken one.

An exhibit is a file of this folder. It replaces one function of a milestone by a wrong one, names
the traffic that shows it, and says what cannot be: its `invariant` looks at a run and yields what
no correct engine's trace has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from milestone_llm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from milestone_llm.trace.records import StepRecord

MAX_STEPS = 60
CONFIG = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64, "block_size": 4,
          "kv_cache_tokens": 128}  # fmt: skip
"""Of every exhibit's engine, where it does not say otherwise."""

SWITCHES: dict[str, dict[str, object]] = {
    "one request at a time": {"max_num_seqs": 1},
    "no prefix cache": {"enable_prefix_caching": False},
    "a larger budget": {"max_num_batched_tokens": 256},
    "more memory": {"kv_cache_tokens": 1024},
    "no pipelining": {"async_scheduling": False},
    "no guesses": {"speculation": None},
}
"""What can be changed from outside to find out in which part of an engine a bug is."""


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    """Parameters of a request that takes the likeliest token, and as many as it wants."""
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    )


@dataclass(frozen=True)
class Arrival:
    """A request that comes before the step given."""

    step: int
    name: str
    prompt: list[int]
    params: SamplingParams
    after: str = ""
    """A request whose prompt and answer its prompt begins with: the next turn of a chat."""


@dataclass
class Run:
    """What an engine made of the traffic."""

    engine: Any
    prompts: dict[str, list[int]] = field(default_factory=dict)
    params: dict[str, SamplingParams] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """What each caller was given."""
    texts: dict[str, str] = field(default_factory=dict)
    check: str = ""
    """What the engine's own check of its books says first, as `check_invariants=True` does."""
    raised: str = ""
    """The exception that ended the run."""

    @property
    def records(self) -> list[StepRecord]:
        """The trace."""
        return list(self.engine.tracer.records)

    def prompt(self, arrival: Arrival) -> list[int]:
        """All of a request's prompt."""
        before = arrival.after and self.prompts[arrival.after] + self.tokens[arrival.after]
        self.prompts[arrival.name] = [*before, *arrival.prompt]
        self.params[arrival.name] = arrival.params
        return self.prompts[arrival.name]

    def known(self) -> dict[str, list[int]]:
        """The tokens of each request, prompt and output, as the trace has them."""
        known = {name: list(prompt) for name, prompt in self.prompts.items()}
        for record in self.records:
            for row in record.batch:
                if row.sampled_token is not None:
                    known[row.request_id].append(row.sampled_token)
                if row.num_accepted_tokens:  # of several tokens, the trace has the last alone
                    all_tokens = self.prompts[row.request_id] + self.tokens[row.request_id]
                    known[row.request_id] = all_tokens[: row.end + 1]
        return known


Finding = tuple[int, str]
"""A step, and what of its trace cannot be."""


UNCHECKED = {"milestone_llm.core.engine_core.check_plan": lambda *given: None}
"""In place of the core's look at plans (`core/plan_rules.py`), which would end a run at once."""
UNCHECKED_SETTING = "The core does not check plans here: it would not let this one pass."


@dataclass(frozen=True)
class Exhibit:
    """A bug, the traffic that shows it, the question, and the card."""

    milestone: str
    place: str
    """What is replaced: `m4_prefix_chunked.prefix_cache.PrefixCache.find`."""
    broken: Callable[..., object]
    traffic: Sequence[Arrival]
    invariant: Callable[[Run], Iterator[Finding]]
    """Yields what cannot be. Of a false alarm: what looks as if it could not."""
    text: str
    """`word: text` a line: the question, and what stands on the card. A line that begins with
    spaces continues the line before."""
    walk: str
    """The stop of the walkthrough: a guide's lines, without its title."""
    config: Mapping[str, object] = field(default_factory=dict)
    both: Mapping[str, object] = field(default_factory=dict)
    """What else stands in place of something, in both runs: a device that is slow, say."""
    serve: Callable[[Exhibit, Run], None] | None = None
    """Instead of adding requests and stepping."""
    is_false_alarm: bool = False
    """Nothing is wrong: `broken` is the change that somebody may propose."""
    setting: str = ""
    """What else is to be known of both runs."""
    ask: str = "Which line of this trace is impossible?"
    """What is asked before the card's question."""

    @property
    def card(self) -> dict[str, str]:
        """`text` by its words: question, cause, invariant, fix, test, seen, threads."""
        lines = re.sub(r"\n +", " ", self.text.strip()).split("\n")
        return dict(line.split(": ", 1) for line in lines)

    def run(self, is_changed: bool, switch: Mapping[str, object] | None = None) -> Run:
        """Serve the traffic on the milestone, or on the milestone with `broken` in its place."""
        package = importlib.import_module(self.milestone)
        places = {**self.both, **({self.place: self.broken} if is_changed else {})}
        with contextlib.ExitStack() as stack:
            for place, own in places.items():
                stack.enter_context(mock.patch(place, own))
            fields = {
                "tokenizer": words(),
                **CONFIG,
                **self.config,
                **(switch or {}),
                "trace": "memory",
            }
            run = Run(package.LLMEngine(model(), **fields))
            (self.serve or _serve)(self, run)
        return run

    def suspect(self) -> Run:
        """The run with the line in question: in a false alarm the milestone as it is."""
        return self.run(is_changed=not self.is_false_alarm)

    def switches(self, tokens: Mapping[str, list[int]]) -> dict[str, bool]:
        """Whether the broken engine gives these tokens, by switch: of those that change it."""
        fields = importlib.import_module(self.milestone).EngineConfig.__dataclass_fields__
        now = {name: each.default for name, each in fields.items()}
        now |= {"async_scheduling": False, **CONFIG, **self.config}  # on a CPU
        return {
            text: self._is_right(switch, tokens)
            for text, switch in SWITCHES.items()
            if switch.keys() <= fields.keys() and any(now[name] != switch[name] for name in switch)
        }

    def _is_right(self, switch: Mapping[str, object], tokens: Mapping[str, list[int]]) -> bool:
        run = self.run(is_changed=True, switch=switch)
        is_silent = not (run.raised or run.check or any(self.invariant(run)))
        return is_silent and run.tokens == tokens


def _serve(exhibit: Exhibit, run: Run) -> None:
    """Add the requests when they are due, and step until all are done."""
    engine, coming, num_steps = run.engine, list(exhibit.traffic), 0
    while (coming or engine.has_unfinished_requests()) and num_steps < MAX_STEPS:
        while coming and (coming[0].step <= num_steps or not engine.has_unfinished_requests()):
            due = coming.pop(0)
            engine.add_request(run.prompt(due), due.params, request_id=due.name)
        try:
            take(run, engine.step())
        except Exception as error:
            run.raised = f"{type(error).__name__}: {error}"
            return
        num_steps += 1


def take(run: Run, outputs: Sequence[Any]) -> None:
    """Note what callers were given, and what the engine's own check says after this step."""
    for output in outputs:
        run.tokens[output.request_id], run.texts[output.request_id] = output.token_ids, output.text
    if not run.check:
        try:
            run.engine.scheduler.check_invariants()
        except AssertionError as error:
            run.check = f"step {len(run.records) - 1}: {str(error).splitlines()[0] or 'assertion'}"


@functools.cache
def model() -> Any:
    """A tiny model with random weights, the same in all rooms."""
    from milestone_llm.models.tiny_models import build_tiny_model

    return build_tiny_model("llama").double()


@functools.cache
def words() -> Any:
    """A tokenizer for it, of one word a token: [7, 12] is "w7 w12"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from milestone_llm.models.tiny_models import VOCAB_SIZE

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
