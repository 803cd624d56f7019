"""Draft tokens that the host does not know: it only says how many a row may have."""

from __future__ import annotations

from milestone_llm.core.request import Request

UNKNOWN = -1
"""A draft token that the device will propose (`draft_tokens`), once it has the tokens before."""


class DeviceProposer:
    """Leaves proposing to the device, so the host need not wait for tokens in flight."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Return as many unknown draft tokens as there may be."""
        return [UNKNOWN] * num_tokens
