"""The plan of a step. The scheduler writes a `StepPlan`, the runner carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .kv import BlockTables
from .outputs import SampledToken
from .request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """One row of a step: tokens `start .. start + num_new_tokens - 1` of a request."""

    request: Request
    start: int
    num_new_tokens: int
    is_padding: bool = False
    """Whether the row is wasted work: its request is finished."""
    blocks: list[int] = field(default_factory=list)
    """Where the request's KV lives: its region in m2_batching, its block table from m3_paged on."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved this request (from m4_prefix_chunked on)."""
    num_sampled_tokens: int = 1
    """Most tokens that a request gets from the row, if the row samples."""
    sampling_requests: list[Request] = field(init=False)
    """Requests that get a token: the row's own, if the row reaches its last known token."""

    def __post_init__(self) -> None:
        is_last = not self.is_padding and self.end == self.request.num_tokens
        self.sampling_requests = [self.request] if is_last else []

    @property
    def group_blocks(self) -> list[list[int]]:
        """The request's block table in each group of layers; empty where there is one group."""
        return [self.blocks, *self.blocks.further] if isinstance(self.blocks, BlockTables) else []

    @property
    def end(self) -> int:
        """Tokens computed once the step is done."""
        return self.start + self.num_new_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        return self.request.token_ids[self.start : self.end]

    @property
    def samples(self) -> bool:
        """Whether the row reaches the last known token, so that a new one is sampled."""
        return bool(self.sampling_requests)

    @property
    def prompt_positions(self) -> range:
        """Positions of the row whose logits say how likely the next prompt token was, if asked."""
        if self.is_padding or not self.request.lacks_prompt_logprobs:
            return range(0)
        first = max(self.start, len(self.request.prompt_logprobs) - 1)
        return range(first, min(self.end, self.request.num_prompt_tokens - 1))

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `padding`: a label for people and kernels, not a mode."""
        if self.is_padding:
            return "padding"
        is_prompt = self.num_new_tokens > 1 or self.start < self.request.num_prompt_tokens
        return "prefill" if is_prompt else "decode"

    @property
    def figures(self) -> dict[str, int]:
        """Further figures of the row for a record of the step, by the name of the field."""
        rule = self.request.allowed_tokens if self.samples else None
        return {} if rule is None else {"num_allowed_tokens": rule.num_allowed}


@dataclass(frozen=True)
class Preemption:
    """A running request that had to give up its memory, and why."""

    request: Request
    reason: str


@dataclass
class StepPlan:
    """The rows of one step, and the scheduler's decisions on the way there."""

    rows: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    waiting_reasons: dict[str, str] = field(default_factory=dict)
    """Why requests at the head of the queue were left there, by request id."""
    num_padding_tokens: int = 0
    """Wasted positions: left padding, rows of finished requests."""
    is_launched: bool = False
    """Whether the requests already count the step's tokens as computed."""

    # Blocks to copy before the forward, from and to, in this order (from m3_paged on).
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # device to host
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # host to device
    copies: list[tuple[int, int]] = field(default_factory=list)  # copy-on-write, on the device

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a request, over all rows."""
        return sum(row.num_new_tokens for row in self.rows if not row.is_padding)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, neither rows nor blocks to move."""
        return not self.rows and not self.preempted


@dataclass(frozen=True)
class LaunchedStep:
    """A step under way. `wait` blocks until the step's tokens are there. It returns them by request
    id, for each request its own tokens in order."""

    wait: Callable[[], dict[str, list[SampledToken]]]
