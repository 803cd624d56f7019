"""Guesses that the host does not know: it only says how many a row may have."""

from __future__ import annotations

from milestone_llm.core.request import Request

UNKNOWN = -1
"""A guess that the device will make, when the tokens before it are there (`kernels.guesses`)."""


class DeviceProposer:
    """Leaves the guessing to the device, and so need not wait for tokens in flight."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """As many guesses as may be, none of them known."""
        return [UNKNOWN] * num_tokens
