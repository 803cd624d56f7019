"""The results of a request: snapshots that cost nothing until they are looked at."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

from milestone_llm.core.outputs import Logprob

from .html_table import html_table


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

    def snapshot(self) -> RequestMetrics:
        """Return a copy of the current values."""
        return replace(self, token_times=self.token_times[:])

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


class CompletionOutput:
    """One completion of a prompt, as far as it had come when the snapshot was taken.

    Its tokens and log-probabilities only ever grow. So a snapshot keeps the lists and how long they
    were; the shown values are made when they are asked for.

    Args:
        finish_reason: `stop`, `length`, `abort`, `error`; None while tokens may still come.
        read_text: returns the text as it was at the time of the snapshot.
        stop_reason: the stop string or the id of `stop_token_ids` that has ended it; None: EOS, or
            another reason.
    """

    def __init__(
        self,
        index: int,
        token_ids: list[int],
        logprobs: list[dict[int, Logprob]] | None,
        finish_reason: str | None,
        read_text: Callable[[], str],
        stop_reason: int | str | None = None,
    ) -> None:
        self.index = index
        self.stop_reason = stop_reason
        self.finish_reason = finish_reason
        self.num_tokens = len(token_ids)
        """Number of tokens generated when the snapshot was taken."""
        self._all_token_ids = token_ids
        self._all_logprobs = logprobs
        self._read_text = read_text

    @cached_property
    def token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self._all_token_ids[: self.num_tokens]

    @cached_property
    def text(self) -> str:
        """Text generated so far; empty for an engine without a tokenizer."""
        return self._read_text()

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Per token, log-probabilities by token id; None unless asked for."""
        return None if self._all_logprobs is None else self._all_logprobs[: self.num_tokens]

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the tokens so far; None unless `logprobs` are asked
        for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token_id].logprob for token_id, logprobs in pairs)

    def _shown(self) -> tuple[Any, ...]:
        stop = self.stop_reason
        return self.index, self.token_ids, self.logprobs, self.finish_reason, self.text, stop

    def __eq__(self, other: object) -> bool:
        """Whether both snapshots show the same."""
        return isinstance(other, CompletionOutput) and self._shown() == other._shown()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the snapshot without the request that it was taken of."""
        *shown, text, stop_reason = self._shown()
        return type(self), (*shown, partial(str, text), stop_reason)

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, "
            f"token_ids={self.token_ids}, finish_reason={self.finish_reason!r})"
        )


@dataclass(repr=False)
class RequestOutput:
    """A snapshot of a request, for the user; the last snapshot has `finished` set.

    `outputs` has `SamplingParams.n` completions; `token_ids`, `text`, `finish_reason` and
    `logprobs` are those of the first, and all there is when n is 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, log-probabilities by token id, None for the first; None unless asked for.
    Complete when the first output token is there."""
    read_prompt: Callable[[], str | None] = field(default=lambda: None, compare=False)
    """Returns `prompt`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values that the snapshot shows."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        shown["read_prompt"] = partial(copy, self.prompt)
        return type(self), tuple(shown.values())

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs}, "
            f"metrics={self.metrics})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the prompt, and a row for each completion."""
        prompt = self.prompt_token_ids if self.prompt is None else self.prompt
        rows = [
            (
                each.finish_reason or "goes on",
                f"{each.num_tokens} tokens",
                each.text or each.token_ids,
            )
            for each in self.outputs
        ]
        return html_table([self.request_id, prompt], rows)

    @property
    def prompt(self) -> str | None:
        """The prompt's text as the model sees it, a chat with its template; None without a
        tokenizer."""
        return self.read_prompt()

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the prefix cache."""
        return self.metrics.num_cached_tokens

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
