"""Exhibits, and how they run: the same traffic on an engine as it is, and on a broken one.

An exhibit is a file of this folder. It replaces one function of a milestone by a wrong one, and has
the traffic that shows it. Its `invariant` checks a run, and yields what no correct engine's trace
has.
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
"""Configuration of every exhibit's engine, unless the exhibit has another."""

SWITCHES: dict[str, dict[str, object]] = {
    "one request at a time": {"max_num_seqs": 1},
    "no prefix cache": {"enable_prefix_caching": False},
    "a larger budget": {"max_num_batched_tokens": 256},
    "more memory": {"kv_cache_tokens": 1024},
    "no pipelining": {"async_scheduling": False},
    "no guesses": {"speculation": None},
    "one group of layers": {"disable_hybrid_kv_cache_manager": True},
}
"""Options to switch, from outside, in order to find the part of the engine that has a bug."""


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    """Return sampling parameters: the likeliest token each time, `max_tokens` of them."""
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    )


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before the given step."""

    step: int
    name: str
    prompt: list[int]
    params: SamplingParams
    priority: float = 0
    after: str = ""
    """A request whose prompt and answer come before its own prompt: it is the next turn of a
    chat."""


@dataclass
class Run:
    """A run of an engine on the traffic."""

    engine: Any
    prompts: dict[str, list[int]] = field(default_factory=dict)
    params: dict[str, SamplingParams] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that each caller got."""
    texts: dict[str, str] = field(default_factory=dict)
    check: str = ""
    """First error of the engine's own check of its state, as `check_invariants=True` does it."""
    raised: str = ""
    """The exception that ended the run."""

    @property
    def records(self) -> list[StepRecord]:
        """Records of the run's steps."""
        return list(self.engine.tracer.records)

    def prompt(self, arrival: Arrival) -> list[int]:
        """Return a request's whole prompt."""
        before = arrival.after and self.prompts[arrival.after] + self.tokens[arrival.after]
        self.prompts[arrival.name] = [*before, *arrival.prompt]
        self.params[arrival.name] = arrival.params
        return self.prompts[arrival.name]

    def known(self) -> dict[str, list[int]]:
        """Return the tokens of each request, prompt and output, as in the trace."""
        known = {name: list(prompt) for name, prompt in self.prompts.items()}
        for record in self.records:
            for row in record.batch:
                if row.sampled_token is not None:
                    known[row.request_id].append(row.sampled_token)
                if row.num_accepted_tokens:  # of several tokens, the trace has only the last
                    all_tokens = self.prompts[row.request_id] + self.tokens[row.request_id]
                    known[row.request_id] = all_tokens[: row.end + 1]
        return known


Finding = tuple[int, str]
"""A step, and what is impossible in its trace."""


UNCHECKED = {"milestone_llm.core.engine_core.check_plan": lambda *given: None}
"""Switches off the core's check of plans (`core/plan_rules.py`), which would end a run at once."""
UNCHECKED_SETTING = "The core does not check plans here: it would not let this one pass."


@dataclass(frozen=True)
class Exhibit:
    """A bug, the traffic that shows it, the question, and the card."""

    milestone: str
    place: str
    """Name of the function that is replaced: `m4_prefix_chunked.prefix_cache.PrefixCache.find`."""
    broken: Callable[..., object]
    traffic: Sequence[Arrival]
    invariant: Callable[[Run], Iterator[Finding]]
    """Yields what is impossible. In a false alarm: what looks impossible."""
    text: str
    """`word: text` a line: the question, and the text of the card. A line that begins with spaces
    continues the line before."""
    walk: str
    """The stop of the walkthrough: lines of a guide, without its title."""
    config: Mapping[str, object] = field(default_factory=dict)
    family: str = "llama"
    """Family of the tiny model."""
    both: Mapping[str, object] = field(default_factory=dict)
    """Further replacements, in both runs: a slow device, for example."""
    serve: Callable[[Exhibit, Run], None] | None = None
    """Serves the traffic instead of `_serve`."""
    is_false_alarm: bool = False
    """Nothing is wrong: `broken` is a change that a reader may propose."""
    setting: str = ""
    """Further facts about both runs."""
    ask: str = "Which line of this trace is impossible?"
    """The question before the card's question."""

    @property
    def card(self) -> dict[str, str]:
        """The parts of `text` by their words: question, cause, invariant, fix, test, seen,
        threads."""
        lines = re.sub(r"\n +", " ", self.text.strip()).split("\n")
        return dict(line.split(": ", 1) for line in lines)

    def run(self, is_changed: bool, switch: Mapping[str, object] | None = None) -> Run:
        """Serve the traffic with the milestone; with `is_changed`, `broken` replaces one
        function."""
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
            run = Run(package.LLMEngine(model(self.family), **fields))
            (self.serve or _serve)(self, run)
        return run

    def suspect(self) -> Run:
        """Return the run with the line in question: in a false alarm, that of the milestone as it
        is."""
        return self.run(is_changed=not self.is_false_alarm)

    def switches(self, tokens: Mapping[str, list[int]]) -> dict[str, bool]:
        """Return for each switch that changes the engine whether the broken one then gives these
        tokens."""
        fields = importlib.import_module(self.milestone).EngineConfig.__dataclass_fields__
        now = {name: each.default for name, each in fields.items()}
        now |= {"async_scheduling": False}  # on a CPU
        now |= {"disable_hybrid_kv_cache_manager": True, **CONFIG, **self.config}
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
    """Add the requests when they are due, and step until all are finished."""
    engine, coming, num_steps = run.engine, list(exhibit.traffic), 0
    while (coming or engine.has_unfinished_requests()) and num_steps < MAX_STEPS:
        while coming and (coming[0].step <= num_steps or not engine.has_unfinished_requests()):
            due = coming.pop(0)
            prompt = run.prompt(due)
            engine.add_request(prompt, due.params, request_id=due.name, priority=due.priority)
        try:
            take(run, engine.step())
        except Exception as error:
            run.raised = f"{type(error).__name__}: {error}"
            return
        num_steps += 1


def take(run: Run, outputs: Sequence[Any]) -> None:
    """Record the outputs that callers got, and the result of the engine's own check after this
    step."""
    for output in outputs:
        run.tokens[output.request_id], run.texts[output.request_id] = output.token_ids, output.text
    if not run.check:
        try:
            run.engine.scheduler.check_invariants()
        except AssertionError as error:
            run.check = f"step {len(run.records) - 1}: {str(error).splitlines()[0] or 'assertion'}"


@functools.cache
def model(family: str = "llama") -> Any:
    """Return a tiny model with random weights, the same for all exhibits of a family."""
    from milestone_llm.models.tiny_models import build_tiny_model

    tiny = build_tiny_model(family).double()
    tiny.set_experts_implementation("eager")  # torch's grouped products know no float64
    return tiny


@functools.cache
def words() -> Any:
    """Return a tokenizer for it, with one word a token: [7, 12] is "w7 w12"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from milestone_llm.models.tiny_models import VOCAB_SIZE

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
