"""What HTTP needs of an engine, wherever the engine is: the seam between the two.

Behind it stands an engine in this process (`EngineLoop`) or in another one (`EngineProcess`). What
crosses it is plain data that can be pickled. Nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from milestone_llm.core.outputs import EngineCoreOutput, RequestFacts
from milestone_llm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from milestone_llm.trace.records import StepRecord

StepSink = Callable[["StepRecord"], None]


class EngineDeadError(RuntimeError):
    """The engine will compute nothing any more."""


@dataclass(frozen=True)
class EngineInfo:
    """What does not change while an engine serves."""

    model_name: str
    max_model_len: int
    max_num_seqs: int
    """Most rows of a step, of all engines together."""
    max_num_batched_tokens: int
    """Most tokens of a step of one engine."""
    num_kv_blocks: int
    """Of one engine."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any
    """The model's, or None. A thread that uses it takes a copy."""
    engine: str = "0"
    """What `/metrics` calls it, or all of several."""


@dataclass(frozen=True)
class EngineRequest:
    """A request on its way to the engine, which numbers and seeds it. Checked for its model."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    is_streamed: bool = True
    """Whether the client is told each token. If not, another replica may begin anew."""
    arrival_time: float = field(default_factory=time.perf_counter)
    """When the client asked, in seconds of `time.perf_counter()`: all processes of a machine have
    the same."""

    @property
    def completion_ids(self) -> list[str]:
        """Of each completion; the first is the request's own."""
        further = [f"{self.request_id}/{index}" for index in range(1, self.params.n)]
        return [self.request_id, *further]

    def most_tokens(self, max_model_len: int) -> int:
        """How many tokens it may have at its end: its prompt's, and those of all completions."""
        num_prompt_tokens = len(self.prompt_token_ids)
        most = min(self.params.max_tokens, max_model_len - num_prompt_tokens)
        return num_prompt_tokens + self.params.n * most


class Refusal(NamedTuple):
    """Why nothing will come of a request, or nothing more."""

    text: str
    status: int
    """Of HTTP."""


class StepFigures(NamedTuple):
    """What `/metrics` counts of a step."""

    seconds: float
    num_rows: int
    num_tokens: int
    """Computed: of prompts, and of outputs."""


@dataclass
class EngineCoreOutputs:
    """What a step has brought to all requests together: one message, and no object a token."""

    time: float = field(default_factory=time.perf_counter)
    """When the step ended."""
    engine: str = "0"
    """Which one it is, if there may be several."""
    request_ids: list[str] = field(default_factory=list)
    """Completions that have got one token, and of which nothing else is to be said."""
    token_ids: list[int] = field(default_factory=list)
    """Theirs."""
    others: list[EngineCoreOutput] = field(default_factory=list)
    """Of completions that have ended, or have got anything but one token."""
    facts: dict[str, RequestFacts] = field(default_factory=dict)
    """Of those whose token is the first."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """By request."""
    steps: list[StepFigures] = field(default_factory=list)
    """That have ended since the last message."""

    @property
    def is_of_steps(self) -> bool:
        """Whether it brings more than refusals."""
        return bool(self.request_ids or self.others or self.steps)

    def add(self, output: EngineCoreOutput) -> None:
        """Take in what a completion has got."""
        tokens = output.new_token_ids
        if len(tokens) == 1 and output.finish_reason is None and not output.new_logprobs:
            self.request_ids.append(output.request_id)
            self.token_ids.append(tokens[0])
            if output.facts is not None:
                self.facts[output.request_id] = output.facts
        else:
            self.others.append(output)

    def extend(self, later: EngineCoreOutputs) -> None:
        """Take in what later steps have brought."""
        for output in later.outputs():
            self.add(output)
        self.refusals |= later.refusals
        self.steps += later.steps

    def outputs(self) -> Iterator[EngineCoreOutput]:
        """What each completion has got."""
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            facts = self.facts.get(request_id) if self.facts else None
            yield EngineCoreOutput(request_id, [token_id], facts=facts)
        yield from self.others

    def arrived(self) -> EngineCoreOutputs:
        """This message from another machine, whose clock is another, with times of ours."""
        now = time.perf_counter()
        for facts in (*self.facts.values(), *(each.facts for each in self.others)):
            if facts is not None and facts.first_scheduled_time is not None:
                facts.first_scheduled_time += now - self.time
        self.time = now
        return self


@dataclass(frozen=True)
class EngineReport:
    """How things stand in an engine, for `/metrics`."""

    stats: dict[str, Any]
    """`LLMEngine.stats()`, and how many of the waiting requests had been running."""
    engine: str = "0"
    """Which one it is, if there may be several."""


Deliver = Callable[[EngineCoreOutputs], None]
"""Called with what each step has brought, in the thread of `EngineClient.run`."""


class EngineClient(Protocol):
    """Engines, as HTTP sees them. `run` is the main thread's; the rest is HTTP's."""

    info: EngineInfo

    @property
    def problem(self) -> str | None:
        """Why nothing can be computed at present, though it may be later."""

    def run(self, deliver: Deliver) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: nothing more will come.
        """

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine refuses one, it says so."""

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; before the next step it has no memory any more."""

    def end_completion(self, completion_id: str) -> None:
        """A stop string has ended a completion; others of its request go on."""

    def report(self) -> Future[list[EngineReport]]:
        """Ask for the figures of each engine; the answer comes between two steps."""

    def watch(self, sink: StepSink | None) -> None:
        """Give each step's record to `sink`, in the thread of `run`; None: no more."""

    def stop(self) -> None:
        """Let `run` return after the step under way."""
