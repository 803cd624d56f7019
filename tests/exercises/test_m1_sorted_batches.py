"""Checks exercises/m1_sorted_batches.py."""

import random

from helpers.schedulers import Life, of_length
from m1_single import EngineConfig
from m1_single.scheduler import Scheduler

EXERCISE = ("m1_sorted_batches.py", "SortedScheduler")
WRONG, TOLD = Scheduler, "56% of the computed positions"


def life_with(kind):
    return Life(scheduler=kind(EngineConfig(max_num_seqs=4), 1024))


def requests_of_two_sizes():
    """Short and long ones, alternating: FCFS mixes them in every batch."""
    sizes = [(8, 10), (64, 80)] * 8
    return [of_length(f"r{i}", prompt, output) for i, (prompt, output) in enumerate(sizes)]


def useful_share(kind):
    useful = padding = 0
    for plan in life_with(kind).steps({0: requests_of_two_sizes()}):
        useful += plan.num_tokens
        padding += plan.num_padding_tokens
    return useful / (useful + padding)


def test_less_of_the_work_is_padding(exercise, figure):
    share, before = useful_share(exercise), useful_share(Scheduler)
    figure("computed positions that belong to a request", f"{share:.0%}", f"{before:.0%}")
    assert share > 0.95, (
        f"{share:.0%} of the computed positions belong to a request. There are two sizes of "
        "requests here, and a batch should hold requests of one size."
    )


def test_who_waits_longest_is_in_the_next_batch(exercise):
    rng = random.Random(0)
    life = life_with(exercise)
    scheduler = life.scheduler
    for arrival in range(200):
        sizes = (rng.randint(1, 90), rng.randint(1, 9))
        life.add(of_length(f"r{arrival}", *sizes))
        if arrival % 4 == 0:
            oldest = min(scheduler.waiting, key=lambda request: request.arrival)
            plan = scheduler.schedule()
            if plan.admitted:
                assert oldest in plan.admitted, (
                    f"request {oldest.arrival} has waited longest and is not in the next batch, "
                    f"which is {[request.arrival for request in plan.admitted]}"
                )
                left = [request.arrival for request in scheduler.waiting]
                assert left == sorted(left), f"the queue has lost the order of arrival: {left}"
            scheduler.update(plan, life.device.run(plan))


def test_every_request_gets_all_its_tokens(exercise):
    requests = requests_of_two_sizes()
    for _ in life_with(exercise).steps({0: requests[:9], 7: requests[9:]}):
        pass
    for request in requests:
        wanted = request.sampling_params.max_tokens
        assert request.num_output_tokens == wanted, (
            f"{request.request_id} has {request.num_output_tokens} of {wanted} tokens"
        )
