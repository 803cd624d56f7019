"""What HTTP needs of an engine, wherever the engine is: the seam between the two.

Behind it stands an engine in this process (`EngineLoop`) or in another one (`EngineProcess`). What
crosses it is plain data that can be pickled. Nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from milestone_llm.core.outputs import Logprob
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.trace.records import StepRecord

from .engine_metrics import EngineMetrics

StepSink = Callable[[StepRecord], None]


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
    tokenizer: Any
    """The model's, or None. Code beside the engine's thread takes a copy."""


@dataclass(frozen=True)
class EngineRequest:
    """A request on its way to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    is_streamed: bool = False
    """Whether each token is wanted as it comes, or all of them in the end."""
    arrival_time: float = field(default_factory=time.perf_counter)
    """When the client asked, in seconds of `time.perf_counter()`: all processes of a machine have
    the same."""


@dataclass
class CompletionDelta:
    """What a completion has got since its last delta."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None

    def extend(self, later: CompletionDelta) -> None:
        """Take the next delta in."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


@dataclass
class RequestDelta:
    """What a request has got since its last delta."""

    request_id: str
    completions: list[CompletionDelta] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With the first tokens, if they were asked for."""
    refusal: str | None = None
    """Why nothing will come, or nothing more."""
    status: int = 400
    """Of HTTP, for a refusal."""


@dataclass(frozen=True)
class EngineReport:
    """What `/metrics` shows of an engine."""

    stats: dict[str, Any]
    """`LLMEngine.stats()`, and how many of the waiting requests had been running."""
    metrics: EngineMetrics
    replica: str = ""
    """Which one it is, if there may be several."""


class EngineClient(Protocol):
    """Engines, as HTTP sees them. `run` is the main thread's; the rest is HTTP's."""

    info: EngineInfo

    @property
    def problem(self) -> str | None:
        """Why nothing can be computed at present, though it may be later."""

    def run(self, deliver: Callable[[list[RequestDelta]], None]) -> None:
        """Serve until `stop`.

        Args:
            deliver: called in this thread with what steps have brought.

        Raises:
            EngineDeadError: nothing more will come.
        """

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine refuses one, its delta says so."""

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; before the next step it has no memory any more."""

    def want_more(self) -> None:
        """HTTP has passed the last deltas on. Until this is said, tokens are collected and go out
        together: a step's worth at a time, or that of several.
        """

    def report(self) -> Future[list[EngineReport]]:
        """Ask for the figures of each engine; the answer comes between two steps."""

    def watch(self, sink: StepSink | None) -> None:
        """Give each step's record to `sink`, in the thread of `run`; None: to nobody any more."""

    def stop(self) -> None:
        """Let `run` return after the step under way."""
