"""Outputs of a step: tokens, how likely they were, and why a request ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token under the model's raw distribution (before temperature)."""

    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""

    @property
    def decoded_token(self) -> str:
        """Refuse a name of vLLM's.

        Raises:
            AttributeError: says what to use instead.
        """
        instead = "engine.tokenizer.decode(token_id), of the ids that it is listed by"
        raise AttributeError(f"Logprob has no 'decoded_token' of vLLM's; instead: {instead}")


@dataclass(slots=True)
class SampledToken:
    """A token that a step has sampled for a request."""

    token_id: int
    """-1 where there was no token to choose: the logits held a NaN or an infinity."""
    logprobs: dict[int, Logprob] | None = None


@dataclass(slots=True)
class RequestFacts:
    """Figures of a request besides its tokens."""

    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Present in the first output only, if they were asked for."""


@dataclass(slots=True)
class EngineCoreOutput:
    """New tokens of a request since its last output."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Per new token, log-probabilities by token id; empty unless asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error`; None while tokens may still come."""
    facts: RequestFacts | None = None
    """Present in the first and in the last output of the first of a prompt's completions."""
    failed_rule: str | None = None
    """Why no token was allowed, if the request has ended with `error` for that."""
