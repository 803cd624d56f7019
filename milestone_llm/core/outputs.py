"""What a step gives back: tokens, how likely they were, and why a request ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token under the model's raw distribution (before temperature)."""

    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""


@dataclass(slots=True)
class SampledToken:
    """A token that a step has brought a request."""

    token_id: int
    """-1 where there was none to choose: the logits held a NaN or an infinity."""
    logprobs: dict[int, Logprob] | None = None


@dataclass(slots=True)
class RequestFacts:
    """What is known of a request besides its tokens."""

    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With the first output alone, if they were asked for."""


@dataclass(slots=True)
class EngineCoreOutput:
    """What a request has got since its last output."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Per new token, log-probabilities by token id; empty unless asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error`; None while tokens may still come."""
    facts: RequestFacts | None = None
    """With the first output and with the last, if it is the first of a prompt's completions."""
