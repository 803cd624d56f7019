"""Checks exercises/m1_sorted_batches.py."""

import random

import pytest

from engine_helpers import FakeRunner, make_request, scripted_steps
from m1_single import EngineConfig
from m1_single.scheduler import Scheduler
from milestone_llm.engine.request_queue import RequestQueue

EXERCISE = ("m1_sorted_batches.py", "SortedScheduler")


def scheduler_of(kind, max_num_seqs=4):
    return kind(EngineConfig(max_num_seqs=max_num_seqs), 1024)


def requests_of_two_sizes():
    """Short and long ones, alternating: FCFS mixes them in every batch."""
    sizes = [(8, 10), (64, 80)] * 8
    return [
        make_request(f"r{i}", prompt, output, arrival=i) for i, (prompt, output) in enumerate(sizes)
    ]


def useful_share(kind):
    useful = padding = 0
    for plan in scripted_steps(scheduler_of(kind), {0: requests_of_two_sizes()}):
        useful += plan.num_tokens
        padding += plan.num_padding_tokens
    return useful / (useful + padding)


def check_oldest_is_always_taken(kind):
    rng = random.Random(0)
    scheduler, runner = scheduler_of(kind), FakeRunner()
    for arrival in range(200):
        sizes = (rng.randint(1, 90), rng.randint(1, 9))
        scheduler.add(make_request(f"r{arrival}", *sizes, arrival=arrival))
        if arrival % 4 == 0:
            oldest = min(scheduler.waiting, key=lambda request: request.arrival)
            plan = scheduler.schedule()
            if plan.admitted:
                assert oldest in plan.admitted
                left = [request.arrival for request in scheduler.waiting]
                assert left == sorted(left), "who was not chosen keeps its place"
            scheduler.update(plan, runner.run(plan))


def test_less_of_the_work_is_padding(exercise):
    assert useful_share(exercise) > 0.95


def test_who_waits_longest_is_in_the_next_batch(exercise):
    check_oldest_is_always_taken(exercise)


def test_every_request_gets_all_its_tokens(exercise):
    requests = requests_of_two_sizes()
    for _ in scripted_steps(scheduler_of(exercise), {0: requests[:9], 7: requests[9:]}):
        pass
    for request in requests:
        assert request.num_output_tokens == request.sampling_params.max_tokens


def test_what_the_exercise_starts_from_is_not_good_enough():
    assert useful_share(Scheduler) < 0.6


def test_sorting_by_length_alone_is_caught():
    class ByLength(RequestQueue):
        def key(self, request):
            return (request.num_prompt_tokens, request.arrival, 0)

    class ShortestFirst(Scheduler):
        def __init__(self, config, max_model_len):
            super().__init__(config, max_model_len)
            self.waiting = ByLength()

    assert useful_share(ShortestFirst) > 0.95
    with pytest.raises(AssertionError):
        check_oldest_is_always_taken(ShortestFirst)
