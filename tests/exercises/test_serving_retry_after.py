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


def check_few_knock_in_vain(kind, server):
    refusals, _ = overload(kind, server)
    assert refusals <= 3, (
        f"{server} server: {refusals:.2f} refusals for each request served, at most 3 are "
        "wanted. Clients come back before there is room, or many at the same time."
    )


def check_the_server_is_busy(kind, server):
    _, time = overload(kind, server)
    assert time <= 1.1, (
        f"{server} server: all are served after {time:.3f} times the time that the work takes, "
        "at most 1.1 is wanted. The server was idle while clients waited for their time to come "
        "back."
    )


class Always:
    """The same advice for all."""

    def finished(self, now):
        pass

    def seconds(self, now):
        return self.value


class AlwaysOne(Always):
    value = 1


class AlwaysLong(Always):
    value = 120


@pytest.mark.parametrize("server", MEAN_SECONDS)
def test_few_knock_in_vain(exercise, server, figure):
    refusals, before = (overload(kind, server)[0] for kind in (exercise, AlwaysOne))
    figure(f"refusals a request, {server} server", f"{refusals:.1f}", f"{before:.1f}")
    check_few_knock_in_vain(exercise, server)


@pytest.mark.parametrize("server", MEAN_SECONDS)
def test_the_server_is_busy(exercise, server, figure):
    time, before = (overload(kind, server)[1] for kind in (exercise, AlwaysOne))
    figure(f"time by that of the work, {server} server", f"{time:.2f}", f"{before:.2f}")
    check_the_server_is_busy(exercise, server)


def test_a_second_for_everybody_is_caught():
    check_the_server_is_busy(AlwaysOne, "slow")
    with pytest.raises(AssertionError, match="refusals for each request served"):
        check_few_knock_in_vain(AlwaysOne, "slow")


def test_a_long_time_for_everybody_is_caught():
    with pytest.raises(AssertionError, match="The server was idle"):
        check_the_server_is_busy(AlwaysLong, "fast")


def test_a_guess_of_the_speed_is_caught():
    class OneASecond:
        """Right for the slow server."""

        def __init__(self):
            self.last = 0.0

        def finished(self, now):
            pass

        def seconds(self, now):
            self.last = max(now, self.last) + 1.0
            return max(1, int(self.last - now))

    check_the_server_is_busy(OneASecond, "slow")
    with pytest.raises(AssertionError, match=r"fast server: .*The server was idle"):
        check_the_server_is_busy(OneASecond, "fast")


def test_the_same_time_for_all_who_are_refused_together_is_caught():
    class WhenTheQueueIsServed:
        """Measures the speed, and sends everybody away for as long as those inside take."""

        def __init__(self):
            self.done = []

        def finished(self, now):
            self.done.append(now)

        def seconds(self, now):
            return max(1, int(MAX_INSIDE * now / max(1, len(self.done))))

    with pytest.raises(AssertionError, match="or many at the same time"):
        check_few_knock_in_vain(WhenTheQueueIsServed, "slow")
