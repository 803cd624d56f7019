"""The playground's setting. A preset is a file with one, a link contains one, the page edits
one."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from typing import Annotated, Any
from urllib.parse import quote, unquote

from pydantic import Field, TypeAdapter, ValidationError, validate_call
from pydantic.dataclasses import dataclass

from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.workloads import (
    WorkItem,
    exactly,
    random_tokens,
    with_poisson_arrivals,
)

ENGINES = {
    "m1_single": "M1 static batches",
    "m2_batching": "M2 continuous",
    "m3_paged": "M3 paged",
    "m4_prefix_chunked": "M4 prefix, chunks",
}
VOCAB_SIZE = 199  # of the tiny models: their engines take the same prompts
MAX_MODEL_LEN, MAX_REQUESTS, MAX_LAYERS = 8192, 200, 12
_MEANINGLESS = {"dtype", "device", "seed", "trace", "check_invariants", "scheduler"}
_MEANINGLESS |= {"gpu_memory_utilization", "aging_seconds", "revision"}

Count = Annotated[int, Field(ge=0, le=MAX_MODEL_LEN)]


@dataclass(frozen=True, config={"extra": "forbid"})
class RequestSpec:
    """A request: when it arrives, in seconds, and how many tokens it has."""

    arrival: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    prompt: Count = 32
    output: Count = 32
    priority: Count = 0
    shared: Count = 0
    """Tokens at the beginning of the prompt that it has in common with other requests."""
    tokens: list[Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]] = field(default_factory=list)
    """Token ids at the beginning of the prompt; the others are made."""

    def item(self, index: int, step: int = 0) -> WorkItem:
        """Return request `index` as work for an engine: tokens that are given or shared, then
        tokens of its own."""
        own, common, vocabulary = random.Random(index), random.Random("shared"), range(VOCAB_SIZE)
        prompt = self.tokens[: self.prompt]
        prompt += common.choices(vocabulary, k=min(self.shared, self.prompt) - len(prompt))
        prompt += own.choices(vocabulary, k=self.prompt - len(prompt))
        return WorkItem(prompt, exactly(self.output), step, priority=self.priority)


@dataclass(frozen=True, config={"extra": "forbid"})
class Side:
    """An engine and fields of its `EngineConfig`. Fields that it lacks are kept for another
    engine."""

    engine: str = "m4_prefix_chunked"
    """One of `ENGINES`; "own", the reader's file; or "own before", the file's last version."""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, config={"extra": "forbid"})
class Setting:
    """A complete setting: requests, one or two sides, a machine, and a question with its answer."""

    requests: Annotated[list[RequestSpec], Field(min_length=1, max_length=MAX_REQUESTS)]
    sides: Annotated[list[Side], Field(min_length=1, max_length=2)]
    machine: str = "laptop"
    layers: str = ""
    """What the layers of M4's model see: "32, all" if half of them see a window of 32 tokens."""
    question: str = ""
    answer: str = ""
    shows: list[str] = field(default_factory=list)
    """Conditions on the sides' figures for the answer to hold: `ttft: B < A`."""

    @classmethod
    def of(cls, data: Any) -> Setting:
        """Return the setting in plain data or in a link."""
        with told_in_a_line():
            if isinstance(data, str):
                return _SETTING.validate_json(unquote(data.removeprefix("#")))
            return _SETTING.validate_python(data)

    def to_json(self) -> str:
        """Return the values that are not defaults, as JSON."""
        return _SETTING.dump_json(self, exclude_defaults=True).decode()

    def to_link(self) -> str:
        """Return the fragment of an address with this setting."""
        return "#" + quote(self.to_json(), safe="{}[]:,")

    def windows(self) -> list[int | None]:
        """Return the windows of the layers; None: a layer sees all tokens.

        Raises:
            InputError: something else than windows and "all", or more layers than a page can show.
        """
        words = [word.strip() for word in self.layers.split(",")] if self.layers else []
        if len(words) > MAX_LAYERS or not all(
            re.fullmatch("all|[1-9][0-9]{0,5}", w) for w in words
        ):
            raise InputError(
                f'layers must be up to {MAX_LAYERS} windows of tokens or "all", such as "32, all", '
                f"got {self.layers!r}"
            )
        return [None if word == "all" else int(word) for word in words]

    def in_order(self) -> list[RequestSpec]:
        """Return the requests in order of arrival: the first is r0."""
        return sorted(self.requests, key=lambda request: request.arrival)

    def labels(self) -> list[str]:
        """Return titles of the sides: the engine, and the fields in which it differs from the other
        side."""
        titles = {name: title.partition(" ")[0] for name, title in ENGINES.items()}
        titles |= {"own": "yours", "own before": "yours, before"}
        labels, values = [], [{**defaults_of(each.engine), **each.fields} for each in self.sides]
        for name, side, mine, other in zip("AB", self.sides, values, values[::-1], strict=False):
            own = [f"{key}={mine[key]}" for key in mine if mine[key] != other.get(key, mine[key])]
            labels.append(" ".join([f"{name}: {titles.get(side.engine, side.engine)}", *own]))
        return labels


_SETTING = TypeAdapter(Setting)


@validate_call
def random_requests(
    count: Annotated[int, Field(ge=1, le=MAX_REQUESTS)],
    rate: Annotated[float, Field(gt=0, le=1e6)],
    seed: int,
    prompt: tuple[Count, Count],
    output: tuple[Count, Count],
) -> list[RequestSpec]:
    """Return requests with random arrivals, `rate` a second, as the bench makes them. `prompt` and
    `output` are ranges of lengths."""
    ranges = [(max(1, min(each)), max(1, *each)) for each in (prompt, output)]
    items = random_tokens(count, *ranges, vocab_size=VOCAB_SIZE, seed=seed)
    return [
        RequestSpec(round(each.arrival_time, 4), len(each.prompt), each.params.max_tokens)
        for each in with_poisson_arrivals(items, rate, seed)
    ]


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """Turn validation errors inside the block into an `InputError`: one line with place and
    reason."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        place = re.sub(r"^requests\.(\d+)\.?", r"r\1: ", place)
        reason = first["msg"].replace("Input should be", "must be")
        if "ctx" in first:
            reason += f", got {first['input']}"
        raise InputError(f"{place}: {reason}".replace(": :", ":")) from None


def config_class(milestone: str) -> Any:
    """Return the `EngineConfig` of a milestone."""
    return importlib.import_module(milestone).EngineConfig


def defaults_of(milestone: str) -> dict[str, Any]:
    """Return the fields of a milestone's `EngineConfig` that have an effect here, with their
    defaults."""
    if milestone not in ENGINES:
        return {}
    found = {each.name: each.default for each in fields(config_class(milestone))}
    return {name: value for name, value in found.items() if name not in _MEANINGLESS}
