"""What HTTP's process counts for `/metrics`, in its thread alone."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from .engine_metrics import SECONDS, TOKENS, Histogram

if TYPE_CHECKING:
    from milestone_llm.frontend.output_processor import RequestState

DELIVERY_SECONDS = (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DELIVERY = "token_delivery_seconds"
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "e2e_request_latency_seconds": ("from a request's arrival to its end", SECONDS),
    "request_prompt_tokens": ("prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("output tokens of a request", TOKENS),
    DELIVERY: ("from a step's end until its tokens are in a stream's socket", DELIVERY_SECONDS),
}
"""What each says, and its bounds."""


ENDS = ("stop", "length", "abort", "error")


class HttpCounts:
    """What is counted of answers, since the server's start."""

    def __init__(self) -> None:
        self.num_refused = 0
        """Requests that were told to come later."""
        self.num_tokens = 0
        """Of answers: none that came after a stop string."""
        self.ends = Counter[str](dict.fromkeys(ENDS, 0))
        """Requests by the reason for which they ended."""
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def note_delivery(self, seconds: float) -> None:
        """An event is in its stream's socket, so long after the end of a step."""
        self.histograms[DELIVERY].observe(seconds)

    def note_end(self, state: RequestState, arrival_time: float) -> None:
        """A request has ended with all of its completions, for whatever reason.

        Args:
            arrival_time: when the client asked, in seconds of `time.perf_counter()`.
        """
        reasons = [completion.finish_reason or "abort" for completion in state.completions]
        reason = "error" if "error" in reasons else reasons[0]
        self.ends[reason] += 1
        if reason in ("abort", "error"):
            return
        num_tokens = sum(len(completion.token_ids) for completion in state.completions)
        for name, value in (
            ("e2e_request_latency_seconds", time.perf_counter() - arrival_time),
            ("request_prompt_tokens", len(state.prompt_token_ids)),
            ("request_generation_tokens", num_tokens),
        ):
            self.histograms[name].observe(value)
