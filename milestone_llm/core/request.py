"""A request on its way through the engine.

A request is one list of tokens, prompt and output together. `num_computed_tokens` of them have
their keys and values in the cache. A step moves that number forward; when it reaches the end of the
list, one token is sampled. There is nothing else to "prefill" and "decode".

A step may be launched before the tokens of the step before have come back (m5_kernels does it).
Tokens that are on their way count in `num_tokens`, and are in `token_ids` once they are known:

    token_ids  | p p p p p p | o o o |  ?        num_tokens = 10, num_in_flight = 1
                 prompt        output   in flight
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .allowed_tokens import AllowedTokens
from .outputs import EngineCoreOutput, Logprob, RequestFacts, SampledToken
from .sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


_NEXT: dict[RequestStatus, tuple[RequestStatus, ...]] = {
    RequestStatus.WAITING: (RequestStatus.RUNNING, RequestStatus.FINISHED),
    RequestStatus.RUNNING: (RequestStatus.WAITING, RequestStatus.SWAPPED, RequestStatus.FINISHED),
    RequestStatus.SWAPPED: (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED),
    RequestStatus.FINISHED: (),
}
"""The statuses that may follow each status. No request is admitted twice, and the end is final."""


@dataclass(eq=False, repr=False)
class Request:
    """One request inside the engine. `arrival` numbers requests as they come."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival: int = 0
    priority: float = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    allowed_tokens: AllowedTokens | None = None
    """The rule for this request's next token. None: any token may come next."""

    status: RequestStatus = RequestStatus.WAITING
    """Changed by `become`."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache, or will be after the steps launched so far."""
    num_in_flight: int = 0
    """Tokens that launched steps are sampling for this request."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    """When a step was first planned for the request, if a listener notes the time."""
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    index: int = 0
    """Number of this completion among those that came together, with the same `arrival`."""

    def __post_init__(self) -> None:
        self.prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        """Log-probabilities of the prompt tokens so far, if asked for. The first token has none:
        nothing comes before it."""
        self.token_ids = list(self.prompt_token_ids)
        """All known tokens: the prompt's, then the output's."""
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.sampling_params.max_tokens
        """Number of tokens, prompt and output, at which the request ends with `length`."""
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
        num_tokens = len(self.token_ids) + self.num_in_flight
        if self.num_in_flight and num_tokens >= self.max_num_tokens:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; also the position of the next one in the output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """How many tokens of the output are known: all, for sampling."""
        return self.num_output_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        is_asked = self.sampling_params.prompt_logprobs is not None
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the request has its `finish_reason`."""
        return self.status is RequestStatus.FINISHED

    def output_since(self, num_tokens: int) -> EngineCoreOutput:
        """Return the tokens that came after the first `num_tokens` output tokens, with their
        logprobs and the `finish_reason`."""
        output = EngineCoreOutput(
            self.request_id,
            self.token_ids[self.num_prompt_tokens + num_tokens :],
            self.logprobs[num_tokens:],
            self.finish_reason,
        )
        if (num_tokens == 0 or self.finish_reason is not None) and self.index == 0:
            output.facts = self._facts(num_tokens == 0)
        if self.finish_reason == "error" and self.allowed_tokens is not None:
            output.failed_rule = self.allowed_tokens.problem
        return output

    def _facts(self, is_first: bool) -> RequestFacts:
        is_asked = self.sampling_params.prompt_logprobs is not None
        return RequestFacts(
            self.num_cached_tokens,
            self.num_preemptions,
            self.first_scheduled_time,
            self.prompt_logprobs if is_asked and is_first else None,
        )

    def append_token(self, sampled: SampledToken) -> None:
        """Take a sampled token, and finish the request if the token was its last.

        A request ends with `stop` (EOS or stop token), `length` (`max_tokens` or `max_model_len`
        reached) or `error` (there was no token to choose).
        """
        self.num_in_flight = max(0, self.num_in_flight - 1)
        if sampled.token_id < 0:
            self.finish("error")
            return
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        self.token_ids.append(sampled.token_id)
        self._end_if_due()

    def _end_if_due(self) -> None:
        is_stop = self.token_ids[-1] in self.stop_token_ids
        if is_stop and (
            self.num_output_tokens > self.sampling_params.min_tokens
            or self.allowed_tokens is not None  # nothing else was allowed
        ):
            self.finish("stop")
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish("length")

    def become(self, status: RequestStatus) -> None:
        """Change the status to one that may follow.

        Raises:
            RuntimeError: the status may not follow. The scheduler has mixed something up.
        """
        if status not in _NEXT[self.status]:
            possible = ", ".join(each.name for each in _NEXT[self.status]) or "nothing more"
            raise RuntimeError(
                f"request {self.request_id} is {self.status.name} and cannot become {status.name}; "
                f"it can become {possible}"
            )
        self.status = status

    def finish(self, reason: str) -> None:
        """End the request; `reason` is stop, length, abort or error."""
        self.num_in_flight = 0
        self.finish_reason = reason
        self.become(RequestStatus.FINISHED)

    def restart(self) -> None:
        """Keep the tokens and compute their KV again, after an interruption anywhere. `token_ids`
        is the truth; all that follows from it may have been interrupted half way."""
        if self.is_finished:
            return
        if self.finish_reason is not None:  # the request was interrupted while it ended
            self.finish(self.finish_reason)
            return
        del self.logprobs[self.num_output_tokens :]
        if self.status is not RequestStatus.WAITING:
            self.num_preemptions += 1
            self.become(RequestStatus.WAITING)
        self.num_computed_tokens = self.num_in_flight = 0
        if self.num_output_tokens:
            self._end_if_due()
