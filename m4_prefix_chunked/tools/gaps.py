"""The pauses between one token and the next, as a user sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milestone_llm.frontend.outputs import RequestOutput


@dataclass(frozen=True)
class GapFigures:
    """Inter-token gaps of some requests, in seconds."""

    num_gaps: int
    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> GapFigures:
        """All gaps of these requests' first completions taken together."""
        return cls.of_times([output.metrics.token_times for output in outputs])

    @classmethod
    def of_times(cls, token_times: Sequence[Sequence[float]]) -> GapFigures:
        """From the times, in seconds, at which each request's tokens were known."""
        gaps = np.concatenate([np.diff(times) for times in token_times])
        if not gaps.size:
            return cls(0, 0.0, 0.0, 0.0)
        return cls(gaps.size, *map(float, np.percentile(gaps, (50, 99, 100))))
