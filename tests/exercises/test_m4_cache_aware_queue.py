"""Checks exercises/m4_cache_aware_queue.py."""

import random
from itertools import pairwise

from helpers.schedulers import Life, prompt, request_of
from milestone_llm.core.request_queue import RequestQueue

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


WRONG, TOLD = FirstComeFirstServed, "the cache saves 16% of the prompt tokens"


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


def test_requests_of_one_prompt_are_served_together(exercise, figure):
    share, before = saved_share(exercise), saved_share(FirstComeFirstServed)
    figure("prompt tokens that the cache saves", f"{share:.0%}", f"{before:.0%}")
    assert share > 0.6, (
        f"the cache saves {share:.0%} of the prompt tokens. Requests of two system prompts "
        "alternate, and memory holds one prompt: serve those first whose prompt is cached."
    )


def test_nobody_starves(exercise):
    count = times_overtaken(exercise)
    assert count == PATIENCE, (
        f"a request that hits nothing is overtaken {count} times, with patience={PATIENCE}"
    )


def test_only_later_arrivals_overtake(exercise):
    count = num_neighbours_alike(exercise)
    assert count > 30, (
        f"of 40 waiting requests of two system prompts, {count} are admitted right after one of "
        "the same prompt. Only a request that arrived later overtakes: who waits its turn is not "
        "overtaken by those before it."
    )


def test_of_the_overtaken_the_first_to_come_is_next(exercise):
    life = life_with(exercise, patience=2)
    life.run(request_of("first", prompt("AAAA", 5, own="first"), max_tokens=2))
    for name, blocks in (("none", "B"), ("some", "A"), ("all1", "AAAA"), ("all2", "AAAA")):
        life.add(request_of(name, prompt(blocks, 5, own=name), max_tokens=2))
    popped = [life.scheduler.waiting.pop().request_id for _ in range(3)]
    assert popped == ["all1", "all2", "none"], (
        f"popped were {popped}. After two requests with more in the cache, those before them have "
        "been overtaken twice, with patience=2. Of these the first to come is next, though "
        "nothing of it is cached."
    )


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
    assert life.scheduler.kv.preempter.num_preemptions > 0
