"""Checks exercises/m1_sorted_batches.py."""

import random

import pytest

from engine_helpers import FakeRunner, make_request, scripted_steps
from m1_single import EngineConfig
from m1_single.scheduler import Scheduler
from milestone_llm.core.request_queue import RequestQueue

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
                assert oldest in plan.admitted, (
                    f"request {oldest.arrival} has waited longest and is not in the next batch, "
                    f"which is {[request.arrival for request in plan.admitted]}"
                )
                left = [request.arrival for request in scheduler.waiting]
                assert left == sorted(left), f"the queue has lost the order of arrival: {left}"
            scheduler.update(plan, runner.run(plan))


def check_less_of_the_work_is_padding(kind):
    share = useful_share(kind)
    assert share > 0.95, (
        f"{share:.0%} of the computed positions belong to a request. There are two sizes of "
        "requests here, and a batch should hold requests of one size."
    )


def test_less_of_the_work_is_padding(exercise, figure):
    share, before = useful_share(exercise), useful_share(Scheduler)
    figure("computed positions that belong to a request", f"{share:.0%}", f"{before:.0%}")
    check_less_of_the_work_is_padding(exercise)


def test_who_waits_longest_is_in_the_next_batch(exercise):
    check_oldest_is_always_taken(exercise)


def test_every_request_gets_all_its_tokens(exercise):
    requests = requests_of_two_sizes()
    for _ in scripted_steps(scheduler_of(exercise), {0: requests[:9], 7: requests[9:]}):
        pass
    for request in requests:
        wanted = request.sampling_params.max_tokens
        assert request.num_output_tokens == wanted, (
            f"{request.request_id} has {request.num_output_tokens} of {wanted} tokens"
        )


def test_batches_in_the_order_of_arrival_are_caught():
    with pytest.raises(AssertionError, match="56% of the computed positions"):
        check_less_of_the_work_is_padding(Scheduler)


def test_sorting_by_length_alone_is_caught():
    class ShortestFirst(Scheduler):
        def _form_batch(self):
            shortest_first = sorted(self.waiting, key=lambda request: request.num_prompt_tokens)
            others = shortest_first[self.config.max_num_seqs :]
            for request in others:
                self.waiting.remove(request)
            batch = super()._form_batch()
            for request in others:
                self.waiting.add(request)
            return batch

    check_less_of_the_work_is_padding(ShortestFirst)
    with pytest.raises(AssertionError, match="has waited longest and is not in the next batch"):
        check_oldest_is_always_taken(ShortestFirst)


def test_a_queue_in_another_order_is_caught():
    class ByLength(RequestQueue):
        def key(self, request):
            return (request.num_prompt_tokens, request.arrival, 0)

    class SortsTheQueue(Scheduler):
        def __init__(self, config, max_model_len):
            super().__init__(config, max_model_len)
            self.waiting = ByLength()

    with pytest.raises(AssertionError, match="has lost the order of arrival"):
        check_oldest_is_always_taken(SortsTheQueue)
