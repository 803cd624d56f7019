"""Outputs on their way to the callers: the newest snapshot of each request, once.

Every output of every request goes through here. The reader is decided when the request comes in:
the call of `generate` or `stream` that brought it (a `Reader`), or the caller of `step`.
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
    """The newest undelivered output of each request, by its reader.

    Threads may put and take at once: each line that changes the books is one operation on one dict.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[Reader | None, str], RequestOutput] = {}

    def put(self, output: RequestOutput, reader: Reader | None) -> None:
        """Keep an output until it is taken; it replaces an older one of the same request."""
        if reader is None or reader.wants_all:
            self._outputs[reader, output.request_id] = output

    def take(self, reader: Reader | None) -> list[RequestOutput]:
        """Outputs that this reader has not had yet."""
        keys = [key for key in list(self._outputs) if key[0] is reader]
        outputs = [self._outputs.pop(key, None) for key in keys]
        return [output for output in outputs if output is not None]  # None: another thread has it

    def has(self, reader: Reader | None) -> bool:
        """Whether there is something for this reader."""
        return any(key[0] is reader for key in list(self._outputs))

    def holds(self, request_id: str) -> bool:
        """Whether an output of a request with this id is undelivered."""
        return any(key[1] == request_id for key in list(self._outputs))
