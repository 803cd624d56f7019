"""Serving: tell a refused client when to come back.

A server that is full answers 429 at once, with the header `Retry-After`: come again after this
number of seconds. The server of this project says 1, always (`AsyncEngine.check_room` in
milestone_llm/serving/api/async_engine.py). Under a long overload that is bad advice: hundreds of
clients try again every second, nearly all in vain. And it would be no better to say 60 to
everybody: then all come back together, most are refused again, and until then the server has
nothing to do.

Design the advice. `finished` is called when a request is done, `seconds` when one is refused. Three
conditions, on a server that gets in ten seconds what takes it minutes:

1. Few attempts are in vain: at most 3 refusals for each request served.
2. The server does not idle: all are served in at most 1.1 times the time that the work takes.
3. `Retry-After` is a whole number of seconds, at least 1 and at most 600.

How fast the server is, you have to find out: the test runs a slow one and a fast one.

    python -m pytest tests/exercises/test_serving_retry_after.py
"""

from __future__ import annotations


class RetryAfter:
    """Advice to clients that are refused."""

    def finished(self, now: float) -> None:
        """A request is done, so there is room for another.

        Args:
            now: seconds; grows from call to call, in `seconds` too.
        """

    def seconds(self, now: float) -> int:
        """A client is refused: after how many seconds is it to come again?

        Hint: how many requests are done a second, so far? That is how often there is room for one.
        So give every refused client a time of its own, one such interval after that of the client
        refused before it, and never before now. What costs more: a client that comes a little too
        early, or one that comes too late?
        """
        raise NotImplementedError
