"""The interface through which HTTP uses an engine, in this process or another.

It is implemented by an engine in this process (`EngineLoop`), in another one (`EngineProcess`), or
by several (`Replicas`). Arguments and results are plain data that can be pickled. Nothing here
imports torch.
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
    """The engine has ended and will compute nothing more."""


@dataclass(frozen=True)
class EngineInfo:
    """Values that do not change while an engine serves."""

    model_name: str
    max_model_len: int
    max_num_seqs: int
    """Most rows of a step, of all engines together."""
    max_num_batched_tokens: int
    """Most tokens of a step of one engine."""
    num_kv_blocks: int
    """KV blocks of one engine."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any
    """The model's tokenizer, or None. A thread that uses it makes a copy."""
    engine: str = "0"
    """Its label in `/metrics`; of several engines, the label of all together."""
    decoder: str = "Hugging Face's modules"
    """Who computes."""


@dataclass(frozen=True)
class EngineRequest:
    """A request to the engine, checked for its model. The engine adds its number and seed."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    is_streamed: bool = True
    """Whether the client gets each token at once. If not, another replica may compute it again."""
    arrival_time: float = field(default_factory=time.perf_counter)
    """When the client asked, in seconds of `time.perf_counter()`, which all processes of a machine
    share."""

    @property
    def completion_ids(self) -> list[str]:
        """Ids of its completions; the first has the id of the request."""
        further = [f"{self.request_id}/{index}" for index in range(1, self.params.n)]
        return [self.request_id, *further]

    def most_tokens(self, max_model_len: int) -> int:
        """Return the most tokens that it may have at its end: its prompt's, and those of all
        completions."""
        num_prompt_tokens = len(self.prompt_token_ids)
        most = min(self.params.max_tokens, max_model_len - num_prompt_tokens)
        return num_prompt_tokens + self.params.n * most


class Refusal(NamedTuple):
    """Why a request failed, before or after its first tokens."""

    text: str
    status: int
    """HTTP status."""


class StepFigures(NamedTuple):
    """Figures of a step for `/metrics`."""

    seconds: float
    num_rows: int
    num_tokens: int
    """Computed tokens, of prompts and of outputs."""


@dataclass
class EngineCoreOutputs:
    """All outputs of a step in one message; most tokens need no object of their own."""

    time: float = field(default_factory=time.perf_counter)
    """When the step ended."""
    engine: str = "0"
    """Label of the engine, if there may be several."""
    request_ids: list[str] = field(default_factory=list)
    """Completions that got one token and nothing else."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens of these completions."""
    others: list[EngineCoreOutput] = field(default_factory=list)
    """Outputs of completions that ended, or got anything other than one token."""
    facts: dict[str, RequestFacts] = field(default_factory=dict)
    """Figures of requests that got their first token, by id."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """Errors, by request id."""
    steps: list[StepFigures] = field(default_factory=list)
    """Steps that ended since the last message."""

    @property
    def is_of_steps(self) -> bool:
        """Whether it has more than errors."""
        return bool(self.request_ids or self.others or self.steps)

    def add(self, output: EngineCoreOutput) -> None:
        """Add a completion's output."""
        tokens = output.new_token_ids
        if len(tokens) == 1 and output.finish_reason is None and not output.new_logprobs:
            self.request_ids.append(output.request_id)
            self.token_ids.append(tokens[0])
            if output.facts is not None:
                self.facts[output.request_id] = output.facts
        else:
            self.others.append(output)

    def extend(self, later: EngineCoreOutputs) -> None:
        """Add the outputs of later steps."""
        for output in later.outputs():
            self.add(output)
        self.refusals |= later.refusals
        self.steps += later.steps

    def outputs(self) -> Iterator[EngineCoreOutput]:
        """Yield each completion's output."""
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            facts = self.facts.get(request_id) if self.facts else None
            yield EngineCoreOutput(request_id, [token_id], facts=facts)
        yield from self.others

    def arrived(self) -> EngineCoreOutputs:
        """Return this message with times of this machine's clock. It came from another machine."""
        now = time.perf_counter()
        for facts in (*self.facts.values(), *(each.facts for each in self.others)):
            if facts is not None and facts.first_scheduled_time is not None:
                facts.first_scheduled_time += now - self.time
        self.time = now
        return self


@dataclass(frozen=True)
class EngineReport:
    """An engine's current state, for `/metrics`."""

    stats: dict[str, Any]
    """`LLMEngine.stats()`, and the number of waiting requests that have been preempted."""
    engine: str = "0"
    """Label of the engine, if there may be several."""


Deliver = Callable[[EngineCoreOutputs], None]
"""Called with the outputs of each step, in the thread of `EngineClient.run`."""


class EngineClient(Protocol):
    """Engines, as HTTP uses them. `run` is called in the main thread, the rest in HTTP's."""

    info: EngineInfo

    @property
    def problem(self) -> str | None:
        """Why the engine cannot compute at present; it may recover. None: it can."""

    def run(self, deliver: Deliver) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: the engine has ended.
        """

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine rejects one, a message says so."""

    def abort(self, request_id: str) -> None:
        """End a request in any state. Its memory is free before the next step."""

    def end_completion(self, completion_id: str) -> None:
        """End a completion after a stop string; others of its request go on."""

    def report(self) -> Future[list[EngineReport]]:
        """Ask for a report of each engine; the answer comes between two steps."""

    def reset_prefix_cache(self) -> Future[list[bool | None]]:
        """Forget all cached KV, between two steps.

        Returns:
            For each engine, whether it was done: not while blocks are in use. None: the engine has
            no prefix cache.
        """

    def watch(self, sink: StepSink | None) -> None:
        """Send each step's record to `sink`, in the thread of `run`; None ends that."""

    def stop(self) -> None:
        """Let `run` return after the current step."""
