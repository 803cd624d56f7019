"""What one step computes. The scheduler writes a `StepPlan`, the runner carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """One row of a step: tokens `start .. start + num_new_tokens - 1` of a request."""

    request: Request
    start: int
    num_new_tokens: int
    is_padding: bool = False
    """A finished row that a static batch still drags along (m1_single only)."""
    blocks: list[int] = field(default_factory=list)
    """Where the request's KV lives: its slot in m2_batching, its block table from m3_paged on."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved this request (from m4_prefix_chunked on)."""

    @property
    def end(self) -> int:
        """Tokens computed once the step is done."""
        return self.start + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether the row reaches the last known token, so that a new one is sampled."""
        return not self.is_padding and self.end == self.request.num_tokens

    @property
    def sampling_requests(self) -> list[Request]:
        """Who gets a token from this row's logits: its request, and what is forked from it."""
        return [self.request, *self.request.forks] if self.samples else []

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `padding`: a label for people and kernels, not a mode."""
        if self.is_padding:
            return "padding"
        is_decode = self.num_new_tokens == 1 and self.start >= self.request.num_prompt_tokens
        return "decode" if is_decode else "prefill"


@dataclass(frozen=True)
class Preemption:
    """A running request that had to give up its memory, and why."""

    request: Request
    reason: str


@dataclass
class StepPlan:
    """The rows of one step, and what the scheduler decided on the way there."""

    rows: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    num_padding_tokens: int = 0
    """Positions computed for nobody: left padding and finished rows (m1_single only)."""

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a request, over all rows."""
        return sum(row.num_new_tokens for row in self.rows if not row.is_padding)
