"""Outputs on their way to one caller: the newest of each request, once."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator
from itertools import repeat

from .outputs import RequestOutput


class OutputQueue:
    """The outputs of one reader: a call of `generate` or `stream`, or all who call `step`.

    Threads may put and take at once: each line that changes it is one operation on one dict or set.

    Args:
        wants_all: whether outputs are wanted as they grow (`stream`, `step`), or only the news that
            a request is done (`generate`).
    """

    def __init__(self, wants_all: bool = True) -> None:
        self.wants_all = wants_all
        self.unfinished: set[str] = set()
        """Ids of the reader's requests that are not done."""
        self.reader: weakref.ref[Generator[RequestOutput | None, None, None]] | None = None
        """The generator that reads it; None: whoever calls `step`."""
        self.is_closed = False
        self._outputs: dict[str, RequestOutput] = {}

    def is_abandoned(self) -> bool:
        """Whether its reader has come to its end in any way, be it an interrupt as it closed."""
        if self.reader is None or self.is_closed:
            return self.is_closed
        generator = self.reader()
        return generator is None or inspect.getgeneratorstate(generator) == inspect.GEN_CLOSED

    def put(self, output: RequestOutput) -> None:
        """Keep an output until it is taken; it replaces an older one of the same request."""
        if self.wants_all:
            self._outputs[output.request_id] = output

    def take(self) -> list[RequestOutput]:
        """Outputs that the reader has not had yet."""
        taken: list[RequestOutput | None] = []
        try:
            # In one call: wherever Ctrl-C comes, what is not in the dict any more is in the list.
            taken.extend(map(self._outputs.pop, list(self._outputs), repeat(None)))
            return [output for output in taken if output is not None]  # else another thread has it
        except BaseException:
            for output in filter(None, taken):
                self._outputs.setdefault(output.request_id, output)  # a newer one may be there
            raise

    def discard(self, request_id: str) -> None:
        """Forget a request's output, if one is here."""
        self._outputs.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)
