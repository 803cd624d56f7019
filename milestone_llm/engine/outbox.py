"""Outputs on their way to those who asked: the newest snapshot of each request, once.

Every output of every request goes through here. Who takes it out is decided when the request comes
in: the call of `generate` or `stream` that brought it (a `Reader`), or whoever calls `step`.
"""

from __future__ import annotations

from .outputs import RequestOutput


class Reader:
    """A call of `generate` or `stream` that waits for its own requests.

    Args:
        wants_all: whether it wants outputs as they grow (`stream`), or only to know when its
            requests are done (`generate`).
    """

    def __init__(self, wants_all: bool) -> None:
        self.wants_all = wants_all
        self.num_unfinished = 0


class Outbox:
    """The newest undelivered output of each request, by who is to get it."""

    def __init__(self) -> None:
        self._outputs: dict[Reader | None, dict[str, RequestOutput]] = {}

    def put(self, output: RequestOutput, reader: Reader | None) -> None:
        """Keep an output until it is taken; it replaces an older one of the same request."""
        if reader is None or reader.wants_all:
            self._outputs.setdefault(reader, {})[output.request_id] = output

    def take(self, reader: Reader | None) -> list[RequestOutput]:
        """Outputs that this reader has not had yet."""
        return list(self._outputs.pop(reader, {}).values())

    def has(self, reader: Reader | None) -> bool:
        """Whether there is something for this reader."""
        return reader in self._outputs

    def holds(self, request_id: str) -> bool:
        """Whether an output of a request with this id is undelivered."""
        return any(request_id in outputs for outputs in self._outputs.values())
