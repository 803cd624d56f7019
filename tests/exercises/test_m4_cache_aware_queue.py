"""Checks exercises/m4_cache_aware_queue.py."""

import random
from itertools import pairwise

import pytest

from milestone_llm.core.request_queue import RequestQueue
from scheduler_helpers import Life, prompt, request_of

EXERCISE = ("m4_cache_aware_queue.py", "CacheAwareQueue")
PATIENCE = 8


def life_with(kind, patience=PATIENCE, **fields):
    """A scheduler of one row, on a pool that holds one request and little else."""
    life = Life(**{"num_blocks": 7, "max_num_seqs": 1, **fields})
    life.scheduler.waiting = kind(life.cache, patience)
    return life


class FirstComeFirstServed(RequestQueue):
    def __init__(self, prefix_cache, patience):
        super().__init__("fcfs")


class NeverPatient(RequestQueue):
    """The longest prefix first, for ever."""

    def __init__(self, prefix_cache, patience):
        super().__init__("fcfs")
        self.prefix_cache = prefix_cache

    def peek(self):
        def key(request):
            return (-self.prefix_cache.find(request).num_tokens, self.key(request))

        return min(self._requests.values(), key=key)

    def pop(self):
        request = self.peek()
        self.remove(request)
        return request


class CountsEveryPop(NeverPatient):
    """Takes requests for overtaken that were not, when one that came before them is popped."""

    def __init__(self, prefix_cache, patience):
        super().__init__(prefix_cache, patience)
        self.patience, self.num_pops = patience, {}

    def peek(self):
        for request in sorted(self._requests.values(), key=self.key):
            if self.num_pops.get(request.request_id, 0) >= self.patience:
                return request
        return super().peek()

    def pop(self):
        request = super().pop()
        for name in self._requests:
            self.num_pops[name] = self.num_pops.get(name, 0) + 1
        return request


def taking_turns(num_each=6):
    """Requests of two system prompts of four blocks each, alternately."""
    return [
        request_of(f"{name}{number}", prompt(name * 4, 5, own=f"{name}{number}"), max_tokens=2)
        for number in range(num_each)
        for name in "AB"
    ]


def saved_share(kind):
    life = life_with(kind)
    life.run(*taking_turns())
    return life.counts["saved_tokens"] / life.counts["queried_tokens"]


def num_neighbours_alike(kind):
    """Of 40 waiting requests, how many are admitted right after one of the same system prompt."""
    life = life_with(kind)
    requests = taking_turns(20)
    life.add(*requests)
    admitted = []
    while len(admitted) < len(requests):
        admitted += [request.request_id[0] for request in life.plan().admitted]
    return sum(one == other for one, other in pairwise(admitted))


def times_overtaken(kind):
    """How often a stranger is overtaken while requests with a cached beginning keep coming."""
    life = life_with(kind)
    life.run(request_of("first", prompt("AAAA", 5, own="first"), max_tokens=2))
    life.add(request_of("stranger", prompt("BBBB", 5), max_tokens=2))
    overtakers = 0
    for number in range(40):
        name = f"A{number}"
        life.add(request_of(name, prompt("AAAA", 5, own=name), max_tokens=2))
        plans = [life.plan(), life.plan()]
        admitted = [request.request_id for plan in plans for request in plan.admitted]
        if "stranger" in admitted:
            return overtakers
        overtakers += len(admitted)
    return overtakers


def check_requests_of_one_prompt_are_served_together(kind):
    share = saved_share(kind)
    assert share > 0.6, (
        f"the cache saves {share:.0%} of the prompt tokens. Requests of two system prompts "
        "alternate, and memory holds one prompt: serve those first whose prompt is cached."
    )


def check_nobody_starves(kind):
    count = times_overtaken(kind)
    assert count == PATIENCE, (
        f"a request that hits nothing is overtaken {count} times, with patience={PATIENCE}"
    )


def check_only_later_arrivals_overtake(kind):
    count = num_neighbours_alike(kind)
    assert count > 30, (
        f"of 40 waiting requests of two system prompts, {count} are admitted right after one of "
        "the same prompt. Only a request that arrived later overtakes: who waits its turn is not "
        "overtaken by those before it."
    )


def check_of_the_overtaken_the_first_to_come_is_next(kind):
    life = life_with(kind, patience=2)
    life.run(request_of("first", prompt("AAAA", 5, own="first"), max_tokens=2))
    for name, blocks in (("none", "B"), ("some", "A"), ("all1", "AAAA"), ("all2", "AAAA")):
        life.add(request_of(name, prompt(blocks, 5, own=name), max_tokens=2))
    popped = [life.scheduler.waiting.pop().request_id for _ in range(3)]
    assert popped == ["all1", "all2", "none"], (
        f"popped were {popped}. After two requests with more in the cache, those before them have "
        "been overtaken twice, with patience=2. Of these the first to come is next, though "
        "nothing of it is cached."
    )


def test_requests_of_one_prompt_are_served_together(exercise, figure):
    share, before = saved_share(exercise), saved_share(FirstComeFirstServed)
    figure("prompt tokens that the cache saves", f"{share:.0%}", f"{before:.0%}")
    check_requests_of_one_prompt_are_served_together(exercise)


def test_nobody_starves(exercise):
    check_nobody_starves(exercise)


def test_only_later_arrivals_overtake(exercise):
    check_only_later_arrivals_overtake(exercise)


def test_of_the_overtaken_the_first_to_come_is_next(exercise):
    check_of_the_overtaken_the_first_to_come_is_next(exercise)


def test_of_equals_the_first_to_come_is_next(exercise):
    life = life_with(exercise)
    names = [f"r{number}" for number in range(6)]
    life.add(*(request_of(name, prompt("", 6, own=name)) for name in names))
    assert [request.request_id for request in life.scheduler.waiting] == names
    popped = [life.scheduler.waiting.pop().request_id for _ in names]
    assert popped == names, "nothing is cached, so the order of arrival decides"


def test_peek_length_and_removal_agree_with_pop(exercise):
    life, rng, waiting = life_with(exercise), random.Random(0), {}
    life.run(request_of("first", prompt("AAAA", 1), max_tokens=2))
    queue = life.scheduler.waiting
    for number in range(200):
        if rng.random() < 0.6:
            blocks = rng.choice(("A", "AA", "AAAA", "B"))
            request = request_of(f"r{number}", prompt(blocks, 2, own=f"r{number}"))
            life.add(request)
            waiting[request.request_id] = request
        elif waiting and rng.random() < 0.3:
            queue.remove(waiting.pop(rng.choice(sorted(waiting))))
        elif waiting:
            request = queue.peek()
            assert queue.pop() is request, "pop() is not what peek() showed"
            del waiting[request.request_id]
        assert len(queue) == len(waiting)
        assert {request.request_id for request in queue} == set(waiting)


def test_everybody_is_served_also_after_preemption(exercise):
    life = life_with(exercise, num_blocks=16, max_num_seqs=4)
    rng = random.Random(1)
    requests = [
        request_of(
            f"r{number}",
            prompt(rng.choice(("AA", "AAB", "C")), rng.randint(1, 6), own=f"r{number}"),
            max_tokens=rng.randint(1, 20),
        )
        for number in range(40)
    ]
    life.run(*requests)
    assert life.scheduler.preempter.num_preemptions > 0


def test_the_queue_that_the_exercise_starts_from_is_caught():
    with pytest.raises(AssertionError, match="the cache saves 16% of the prompt tokens"):
        check_requests_of_one_prompt_are_served_together(FirstComeFirstServed)


def test_a_queue_without_patience_is_caught():
    check_requests_of_one_prompt_are_served_together(NeverPatient)
    with pytest.raises(AssertionError, match="is overtaken 40 times, with patience=8"):
        check_nobody_starves(NeverPatient)


def test_a_queue_that_counts_every_pop_is_caught():
    check_requests_of_one_prompt_are_served_together(CountsEveryPop)
    check_nobody_starves(CountsEveryPop)
    with pytest.raises(AssertionError, match="14 are admitted right after one of the same prompt"):
        check_only_later_arrivals_overtake(CountsEveryPop)


def test_the_most_cached_of_the_overtaken_is_caught():
    class MostCachedOfThem(CountsEveryPop):
        def peek(self):
            overtaken = [
                request
                for request in self._requests.values()
                if self.num_pops.get(request.request_id, 0) >= self.patience
            ]
            cached = self.prefix_cache.find
            if overtaken:
                return max(overtaken, key=lambda request: cached(request).num_tokens)
            return NeverPatient.peek(self)

    check_nobody_starves(MostCachedOfThem)
    with pytest.raises(AssertionError, match="'all2', 'some'"):
        check_of_the_overtaken_the_first_to_come_is_next(MostCachedOfThem)
