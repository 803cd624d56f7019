"""What the playground is set to. A preset is a file of it, a link holds it, the page edits it."""

from __future__ import annotations

import importlib
import random
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
VOCAB_SIZE = 199  # of the tiny models: an engine takes the very same prompts
MAX_MODEL_LEN, MAX_REQUESTS = 8192, 200
_MEANINGLESS = {"dtype", "device", "seed", "trace", "check_invariants", "scheduler"}
_MEANINGLESS |= {"gpu_memory_utilization", "aging_seconds"}

Count = Annotated[int, Field(ge=0, le=MAX_MODEL_LEN)]


@dataclass(frozen=True, config={"extra": "forbid"})
class RequestSpec:
    """A request: when it comes, in seconds, and how many tokens it has."""

    arrival: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    prompt: Count = 32
    output: Count = 32
    priority: Count = 0
    shared: Count = 0
    """Tokens with which the prompt begins as all others do that share something."""

    def item(self, index: int, step: int = 0) -> WorkItem:
        """Request `index` as work for an engine: a beginning that is shared, then its own."""
        own, common, vocabulary = random.Random(index), random.Random("shared"), range(VOCAB_SIZE)
        prompt = common.choices(vocabulary, k=min(self.shared, self.prompt))
        prompt += own.choices(vocabulary, k=self.prompt - len(prompt))
        return WorkItem(prompt, exactly(self.output), step, priority=self.priority)


@dataclass(frozen=True, config={"extra": "forbid"})
class Side:
    """An engine, and fields of its `EngineConfig`: those that it lacks wait for another engine."""

    engine: str = "m4_prefix_chunked"
    """One of `ENGINES`; "own", the reader's file; or "own before", what that was."""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, config={"extra": "forbid"})
class Setting:
    """All of it."""

    requests: Annotated[list[RequestSpec], Field(min_length=1, max_length=MAX_REQUESTS)]
    sides: Annotated[list[Side], Field(min_length=1, max_length=2)]
    machine: str = "laptop"
    question: str = ""
    answer: str = ""
    shows: list[str] = field(default_factory=list)
    """How the figures of the sides must compare for the answer to hold: `ttft: B < A`."""

    @classmethod
    def of(cls, data: Any) -> Setting:
        """A setting from plain data, or from a link."""
        with told_in_a_line():
            if isinstance(data, str):
                return _SETTING.validate_json(unquote(data.removeprefix("#")))
            return _SETTING.validate_python(data)

    def to_json(self) -> str:
        """What is not the default."""
        return _SETTING.dump_json(self, exclude_defaults=True).decode()

    def to_link(self) -> str:
        """The fragment of an address."""
        return "#" + quote(self.to_json(), safe="{}[]:,")

    def in_order(self) -> list[RequestSpec]:
        """Requests as they come: the first is r0."""
        return sorted(self.requests, key=lambda request: request.arrival)

    def labels(self) -> list[str]:
        """Titles of the sides: the engine, then what is set otherwise than on the other side."""
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
    """Requests that come at random, `rate` a second, as the bench makes them; lengths from, to."""
    ranges = [(max(1, min(each)), max(1, *each)) for each in (prompt, output)]
    items = random_tokens(count, *ranges, vocab_size=VOCAB_SIZE, seed=seed)
    return [
        RequestSpec(round(each.arrival_time, 4), len(each.prompt), each.params.max_tokens)
        for each in with_poisson_arrivals(items, rate, seed)
    ]


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """Within, what is wrong with data becomes an InputError: one line that says what and where."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def config_class(milestone: str) -> Any:
    """`EngineConfig` of a milestone."""
    return importlib.import_module(milestone).EngineConfig


def defaults_of(milestone: str) -> dict[str, Any]:
    """Fields of a milestone's `EngineConfig` that mean something here, and their defaults."""
    if milestone not in ENGINES:
        return {}
    found = {each.name: each.default for each in fields(config_class(milestone))}
    return {name: value for name, value in found.items() if name not in _MEANINGLESS}
