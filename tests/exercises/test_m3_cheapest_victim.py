"""Checks exercises/m3_cheapest_victim.py."""

import functools
import random

from helpers.schedulers import Life, of_length
from m3_paged import EngineConfig
from m3_paged.scheduler import Scheduler

EXERCISE = ("m3_cheapest_victim.py", "CheapestVictimScheduler")
MAX_PREEMPTIONS = 4
NUM_STORMS = 4
WRONG, TOLD = Scheduler, "tokens are computed again; with the scheduler as it is"


@functools.cache
def storm(kind, seed):
    """40 requests, short and long, on a pool for two or three of the long ones.

    Returns:
        Tokens computed again, and for each preemption of a request that had been preempted often
        enough: that request, and one running beside it that had not.
    """
    config = EngineConfig(max_num_seqs=16, block_size=4, max_num_batched_tokens=512)
    scheduler = kind(config, 128, 48)
    unfair, preempt = [], scheduler.kv.preempter.preempt

    def watched_preempt(victim, plan, reason):
        if victim.num_preemptions >= MAX_PREEMPTIONS:
            counts = {r.request_id: r.num_preemptions for r in scheduler.running}
            least = min(counts, key=counts.get)
            if counts[least] < MAX_PREEMPTIONS:
                unfair.append((victim.request_id, counts[victim.request_id], least, counts[least]))
        preempt(victim, plan, reason)

    scheduler.kv.preempter.preempt = watched_preempt
    rng = random.Random(seed)
    requests = [
        of_length(f"r{number}", rng.choice((4, 30)), rng.randint(8, 40)) for number in range(40)
    ]
    life = Life(scheduler=scheduler)
    num_computed = sum(plan.num_tokens for plan in life.steps({0: requests}))
    assert all(r.num_output_tokens == r.sampling_params.max_tokens for r in requests)
    num_needed = sum(request.num_tokens - 1 for request in requests)
    return num_computed - num_needed, unfair


def computed_again(kind):
    return sum(storm(kind, seed)[0] for seed in range(NUM_STORMS))


def test_fewer_tokens_are_computed_again(exercise, figure):
    again, before = computed_again(exercise), computed_again(Scheduler)
    figure("tokens computed again", f"{again:,}", f"{before:,}")
    assert again < 0.9 * before, (
        f"{again} tokens are computed again; with the scheduler as it is {before}. The victim, the "
        "last of the order, should be a request with few computed tokens."
    )


def test_nobody_pays_for_all_others(exercise):
    for seed in range(NUM_STORMS):
        for victim, count, other, other_count in storm(exercise, seed)[1][:1]:
            raise AssertionError(
                f"{victim} has been preempted {count} times and is preempted again, while {other}, "
                f"preempted {other_count} times, runs on"
            )
