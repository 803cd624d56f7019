"""Checks exercises/m3_cheapest_victim.py."""

import functools
import random

from engine_helpers import make_request, scripted_steps
from m3_paged import EngineConfig
from m3_paged.scheduler import Scheduler

EXERCISE = ("m3_cheapest_victim.py", "CheapestVictimScheduler")
MAX_PREEMPTIONS = 4
NUM_STORMS = 12


@functools.cache
def storm(kind, seed):
    """40 requests, short and long, on a pool for two or three of the long ones.

    Returns:
        Tokens computed again, and the most preemptions of one request.
    """
    config = EngineConfig(max_num_seqs=16, block_size=4, max_num_batched_tokens=512)
    scheduler = kind(config, 128, 48)
    rng = random.Random(seed)
    requests = [
        make_request(f"r{arrival}", rng.choice((4, 30)), rng.randint(8, 40), arrival=arrival)
        for arrival in range(40)
    ]
    num_computed = sum(plan.num_tokens for plan in scripted_steps(scheduler, {0: requests}))
    assert all(r.num_output_tokens == r.sampling_params.max_tokens for r in requests)
    num_needed = sum(request.num_tokens - 1 for request in requests)
    return num_computed - num_needed, max(r.metrics.num_preemptions for r in requests)


def computed_again(kind):
    return sum(storm(kind, seed)[0] for seed in range(NUM_STORMS))


def most_preemptions(kind):
    return max(storm(kind, seed)[1] for seed in range(NUM_STORMS))


def test_fewer_tokens_are_computed_again(exercise):
    assert computed_again(exercise) < 0.9 * computed_again(Scheduler)


def test_nobody_pays_for_all_others(exercise):
    assert most_preemptions(exercise) <= MAX_PREEMPTIONS


def test_preempting_the_cheapest_without_a_limit_is_caught():
    class AlwaysTheCheapest(Scheduler):
        def by_seniority(self):
            return sorted(self.running, key=lambda request: -request.num_computed_tokens)

    assert computed_again(AlwaysTheCheapest) < 0.9 * computed_again(Scheduler)
    assert most_preemptions(AlwaysTheCheapest) > MAX_PREEMPTIONS
