"""Checks exercises/serving_retry_after.py."""

import functools
import heapq
import random

import pytest

EXERCISE = ("serving_retry_after.py", "RetryAfter")

NUM_REQUESTS = 300
MAX_INSIDE = 8
MEAN_SECONDS = {"slow": 1.0, "fast": 0.3}
"""What a request takes the server, on average."""


class AlwaysOne:
    """The same advice for all."""

    def finished(self, now):
        pass

    def seconds(self, now):
        return 1


WRONG, TOLD = AlwaysOne, "refusals for each request served"


@functools.cache
def overload(kind, server):
    """300 requests come within ten seconds to a server that has room for eight and serves in turn.

    Returns:
        Refusals for each request served, and the time until all are served by the time of the work.
    """
    rng, advice = random.Random(5), kind()
    work = [rng.uniform(0.2, 1.8) * MEAN_SECONDS[server] for _ in range(NUM_REQUESTS)]
    events = [(rng.uniform(0, 10), "comes", number) for number in range(NUM_REQUESTS)]
    first = min(events)[0]
    heapq.heapify(events)
    inside, num_refusals = [], 0
    while events:
        now, what, number = heapq.heappop(events)
        if what == "leaves":
            inside.pop(0)
            advice.finished(now)
        elif len(inside) < MAX_INSIDE:
            inside.append(number)
        else:
            seconds = advice.seconds(now)
            assert isinstance(seconds, int), f"Retry-After is a whole number, yours is {seconds!r}"
            assert 1 <= seconds <= 600, f"Retry-After is {seconds}: not from 1 to 600"
            num_refusals += 1
            assert num_refusals < 1000 * NUM_REQUESTS, "clients come back and back"
            heapq.heappush(events, (now + seconds, "comes", number))
            continue
        is_begun = what == "leaves" or len(inside) == 1
        if inside and is_begun:
            heapq.heappush(events, (now + work[inside[0]], "leaves", inside[0]))
    return num_refusals / NUM_REQUESTS, (now - first) / sum(work)


@pytest.mark.parametrize("server", MEAN_SECONDS)
def test_few_knock_in_vain(exercise, server, figure):
    refusals, before = (overload(kind, server)[0] for kind in (exercise, AlwaysOne))
    figure(f"refusals a request, {server} server", f"{refusals:.1f}", f"{before:.1f}")
    assert refusals <= 3, (
        f"{server} server: {refusals:.2f} refusals for each request served, at most 3 are "
        "wanted. Clients come back before there is room, or many at the same time."
    )


@pytest.mark.parametrize("server", MEAN_SECONDS)
def test_the_server_is_busy(exercise, server, figure):
    time, before = (overload(kind, server)[1] for kind in (exercise, AlwaysOne))
    figure(f"time by that of the work, {server} server", f"{time:.2f}", f"{before:.2f}")
    assert time <= 1.1, (
        f"{server} server: all are served after {time:.3f} times the time that the work takes, "
        "at most 1.1 is wanted. The server was idle while clients waited for their time to come "
        "back."
    )
