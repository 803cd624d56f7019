"""A request on its way through the engine.

What is known of a request is one list of tokens, prompt and output together; how many of them have
their keys and values in the cache is `num_computed_tokens`. A step moves that number forward and,
when it reaches the end of the list, one token is sampled. There is nothing else to "prefill" and
"decode" than this.

A step may be launched before the tokens of the one before have come back (m5_kernels does it).
Tokens that are on their way count in `num_tokens`, and are in `token_ids` once they are known:

    token_ids  | p p p p p p | o o o |  ?        num_tokens = 10, num_in_flight = 1
                 prompt        output   in flight
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .outputs import Logprob, RequestMetrics
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .detokenizer import Detokenizer
    from .outbox import Reader


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True)
class SampledToken:
    """What the runner gives back for one request in one step."""

    token_id: int
    """-1 where there was none to choose: the logits held a NaN or an infinity."""
    logprobs: dict[int, Logprob] | None = None


@dataclass(eq=False, repr=False)
class Request:
    """One request inside the engine.

    `arrival` numbers requests as they come: the lower number is first.
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
    """Tokens whose keys and values are in the cache, or will be after the steps launched so far."""
    num_once_computed: int = 0
    """Tokens that some step has computed. A preempted request computes them again, for nothing."""
    num_in_flight: int = 0
    """Tokens that launched steps are sampling for this request."""
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    leader: Request | None = None
    """For the second and later completions of a prompt (n > 1): the request of the first."""
    index: int = 0
    """Which completion of its prompt this is."""
    reader: Reader | None = None
    """The reader of the outputs: a call of `generate` or `stream`; None: the caller of `step`."""

    is_counted: bool = False
    """Whether the engine has noted that it ended."""

    def __post_init__(self) -> None:
        self.completions: list[Request] = [self]
        """Of a leader: itself and, for n > 1, the further completions of its prompt."""
        self.forks: list[Request] = []
        """Completions that start from this request's KV in the step that completes its prompt."""
        self.prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        """If asked for, of the prompt tokens so far: nothing comes before the first."""
        self.token_ids = list(self.prompt_token_ids)
        """All known tokens: the prompt's, then the output's."""
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.sampling_params.max_tokens
        """Tokens, prompt and output, with which it ends for `length`."""
        eos = frozenset() if self.sampling_params.ignore_eos else self.eos_token_ids
        self.stop_token_ids = eos.union(self.sampling_params.stop_token_ids)
        """Tokens that end this request: its own and, unless ignored, the model's EOS."""

    def __repr__(self) -> str:
        counts = f"{self.num_prompt_tokens} + {self.num_tokens - self.num_prompt_tokens} tokens"
        return f"<Request {self.request_id}: {self.status.name}, {counts}>"

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step can compute now: none while the last token is in flight."""
        if self.num_in_flight and self.num_tokens >= self.max_num_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; also the position of the next one in the output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        is_asked = self.sampling_params.prompt_logprobs is not None and self.leader is None
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens

    def take_prompt_logprobs(self, entries: dict[int, dict[int, Logprob]]) -> None:
        """Keep those of the prompt tokens at some positions; some may be known already."""
        for position, entry in entries.items():
            if position == len(self.prompt_logprobs):
                self.prompt_logprobs.append(entry)

    @property
    def is_finished(self) -> bool:
        """Whether the request has its `finish_reason`."""
        return self.status is RequestStatus.FINISHED

    @property
    def is_done(self) -> bool:
        """Whether this request and all other completions of its prompt are finished."""
        return all(completion.is_finished for completion in (self.leader or self).completions)

    def append_token(self, sampled: SampledToken) -> None:
        """Take a sampled token and finish the request if it was its last.

        Finishing needs a reason: `stop` (EOS, stop token or stop string), `length` (`max_tokens` or
        `max_model_len` reached) or `error` (there was no token to choose).
        """
        self.num_in_flight = max(0, self.num_in_flight - 1)
        if sampled.token_id < 0:
            self.finish("error")
            return
        self.metrics.token_times.append(time.perf_counter())
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        self.token_ids.append(sampled.token_id)
        if self.detokenizer is not None:
            self.detokenizer.append(sampled.token_id, self._may_stop)
        self._end_if_due()

    @property
    def _may_stop(self) -> bool:
        return self.num_output_tokens > self.sampling_params.min_tokens

    def _end_if_due(self) -> None:
        is_stopped = self._may_stop and self.token_ids[-1] in self.stop_token_ids
        if is_stopped or (self.detokenizer is not None and self.detokenizer.is_stopped):
            self.finish("stop")
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End the request; `reason` is stop, length, abort or error."""
        self.num_in_flight = 0
        self.finish_reason = reason
        self.metrics.finish_time = time.perf_counter()
        if self.detokenizer is not None:
            self.detokenizer.flush()
        self.status = RequestStatus.FINISHED

    def restart(self) -> None:
        """After an interruption anywhere: keep the tokens, compute their KV again.

        `token_ids` is the truth. What is derived from it may have been interrupted half way.
        """
        if self.is_finished:
            return
        if self.finish_reason is not None:  # interrupted while it ended
            self.finish(self.finish_reason)
            return
        num_output = self.num_output_tokens
        del self.metrics.token_times[num_output:]
        del self.logprobs[num_output:]
        if self.status is not RequestStatus.WAITING:
            self.metrics.num_preemptions += 1
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = self.num_in_flight = 0
        if self.detokenizer is not None and not self.detokenizer.has_taken(num_output):
            self.detokenizer = self.detokenizer.fresh_copy()
            for place, token_id in enumerate(self.output_token_ids):
                self.detokenizer.append(token_id, place >= self.sampling_params.min_tokens)
        if num_output:
            self._end_if_due()
