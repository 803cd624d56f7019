"""Serving: tell a rejected client when to come back.

A server that is full answers 429 at once, with the header `Retry-After`: come again after this
number of seconds. The server of this project says 1, always (`AsyncEngine.check_room` in
milestone_llm/serving/api/async_engine.py). Under a long overload that is bad advice: hundreds of
clients try again every second, and nearly all fail. And it would be no better to say 60 to all of
them: then all come back together, most are rejected again, and until then the server has nothing to
do.

Design the advice. `finished` is called when a request is done, `seconds` when one is rejected.
Three conditions, on a server that gets in ten seconds what takes it minutes:

1. Few attempts fail: at most 3 rejections for each request served.
2. The server does not idle: all are served in at most 1.1 times the time that the work takes.
3. `Retry-After` is a whole number of seconds, at least 1 and at most 600.

You have to find out how fast the server is: the test runs a slow one and a fast one.

    python -m pytest tests/exercises/test_serving_retry_after.py
"""

from __future__ import annotations


class RetryAfter:
    """Advice to clients that are rejected."""

    def finished(self, now: float) -> None:
        """Note that a request is finished, so that there is room for another.

        Args:
            now: seconds; grows from call to call, in `seconds` too.
        """

    def seconds(self, now: float) -> int:
        """Return after how many seconds a rejected client shall come again.

        Hint: how many requests are finished a second, so far? That is how often there is room for
        one. So give every rejected client a time of its own, one such interval after that of the
        client before it, and never in the past. What costs more: a client that comes a little too
        early, or one that comes too late?
        """
        raise NotImplementedError
