"""A request on its way through the engine, and what the user gets back of it.

`Request` is the engine's own, changing record; `RequestOutput` is the snapshot handed out. What is
known of a request is one list of tokens, prompt and output together; how many of them have their
keys and values in the cache is `num_computed_tokens`. A step moves that number forward and, when
it reaches the end of the list, one token is sampled. There is nothing else to "prefill" and
"decode" than this.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .detokenizer import Detokenizer


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the model's raw distribution (before temperature)."""

    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(frozen=True)
class SampledToken:
    """What the runner gives back for one request in one step."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None


@dataclass
class RequestMetrics:
    """Times in seconds of `time.perf_counter()`, and counts."""

    arrival_time: float
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    """When each output token became known."""
    finish_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    @property
    def first_token_time(self) -> float | None:
        """When the first output token became known."""
        return self.token_times[0] if self.token_times else None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until a step first computed the request."""
        start = self.first_scheduled_time
        return None if start is None else start - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, mean, in seconds."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(eq=False)
class Request:
    """One request inside the engine.

    `arrival` numbers requests in the order of their coming: it decides who is first.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival: int = 0
    priority: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    leader: Request | None = None
    """For the second and later completions of a prompt (n > 1): the request of the first."""

    def __post_init__(self) -> None:
        self.completions: list[Request] = [self]
        """Of a leader: itself and, for n > 1, the further completions of its prompt."""
        self.forks: list[Request] = []
        """Completions that will start from this request's KV as soon as its prompt is computed."""
        self.token_ids = list(self.prompt_token_ids)
        """All known tokens: the prompt's, then the output's."""
        self.num_prompt_tokens = len(self.prompt_token_ids)
        eos = frozenset() if self.sampling_params.ignore_eos else self.eos_token_ids
        self.stop_token_ids = eos.union(self.sampling_params.stop_token_ids)
        """Tokens that end this request: its own and, unless ignored, the model's EOS."""

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; also the position of the next one in the output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether the request has its `finish_reason`."""
        return self.status is RequestStatus.FINISHED

    @property
    def is_done(self) -> bool:
        """Whether this request and all other completions of its prompt are finished."""
        return all(completion.is_finished for completion in (self.leader or self).completions)

    def append_token(self, sampled: SampledToken, max_model_len: int) -> None:
        """Take a sampled token and finish the request if it was its last.

        Finishing needs a reason: `stop` (EOS, stop token or stop string) or `length`
        (`max_tokens` or `max_model_len` reached).
        """
        params = self.sampling_params
        self.token_ids.append(sampled.token_id)
        self.metrics.token_times.append(time.perf_counter())
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        may_stop = self.num_output_tokens > params.min_tokens
        is_stopped = may_stop and sampled.token_id in self.stop_token_ids
        if self.detokenizer is not None:
            is_stopped |= self.detokenizer.append(sampled.token_id, look_for_stop=may_stop)
        if is_stopped:
            self.finish("stop")
        elif self.num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End the request; `reason` is stop, length, abort or error."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.metrics.finish_time = time.perf_counter()
        if self.detokenizer is not None:
            self.detokenizer.flush()


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    """`stop`, `length`, `abort`, `error`; None while tokens may still come."""
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True)
class RequestOutput:
    """What the user sees of a request: a snapshot, the last one once `finished`.

    `outputs` has `SamplingParams.n` completions; `token_ids`, `text`, `finish_reason` and
    `logprobs` are those of the first, and all there is when n is 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics

    @classmethod
    def from_request(cls, request: Request) -> RequestOutput:
        """Snapshot of a request (of a completion: of its leader) as it is now."""
        request = request.leader or request
        outputs = [
            CompletionOutput(
                index=index,
                token_ids=completion.output_token_ids,
                text=completion.detokenizer.text if completion.detokenizer else "",
                finish_reason=completion.finish_reason,
                logprobs=None
                if completion.sampling_params.logprobs is None
                else list(completion.logprobs),
            )
            for index, completion in enumerate(request.completions)
        ]
        return cls(request.request_id, request.prompt_token_ids, outputs, request.metrics)

    @property
    def finished(self) -> bool:
        """Whether no completion will get more tokens."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def finish_reason(self) -> str | None:
        """Why the first completion ended; None while any completion goes on."""
        return self.outputs[0].finish_reason if self.finished else None

    @property
    def token_ids(self) -> list[int]:
        """Tokens generated for the first completion."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Per token of the first completion: log-probabilities by token id."""
        return self.outputs[0].logprobs
