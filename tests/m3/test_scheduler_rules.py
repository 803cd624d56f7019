"""What no plan of `test_golden_plans.py` shows: a request's life, memory that is just enough."""

from __future__ import annotations

import pytest

from helpers.schedulers import M3, M4, Life, completions, of_length
from milestone_llm.core.request import RequestStatus

both_modes = pytest.mark.parametrize("preemption", ["recompute", "swap"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], RequestStatus.WAITING),
        ([], RequestStatus.SWAPPED),
        ([RequestStatus.RUNNING], RequestStatus.RUNNING),
        ([RequestStatus.RUNNING, RequestStatus.SWAPPED], RequestStatus.SWAPPED),
        ([RequestStatus.FINISHED], RequestStatus.RUNNING),
    ],
)
def test_a_request_does_not_become_what_cannot_follow(before, after):
    request = of_length("a", 3)
    for status in before:
        request.become(status)
    with pytest.raises(RuntimeError, match=f"request a is .* cannot become {after.name}"):
        request.become(after)
    assert request.status is ([RequestStatus.WAITING, *before])[-1]


@both_modes
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_lone_request_grows_to_max_model_len_in_a_pool_of_just_that(block_size, preemption):
    num_blocks = -(-24 // block_size)
    life = Life(num_blocks, block_size, 24, M3, preemption=preemption, max_num_seqs=1)
    request = of_length("a", 5, 1000)
    life.run(request)
    assert (request.num_tokens, request.finish_reason) == (24, "length")
    assert life.scheduler.kv.preempter.num_preemptions == 0
    assert life.scheduler.watermark == -(-23 // block_size)  # the last token's KV is not needed


@pytest.mark.parametrize("milestone", [M3, M4])
def test_a_completion_that_is_aborted_before_it_starts_never_does(milestone):
    life = Life(milestone=milestone)
    own = completions(of_length("a", 6, 3, n=3))
    life.add(own[0])
    life.scheduler.finish(own[1], "abort")
    while life.scheduler.has_unfinished_requests():
        life.plan()
    assert [each.finish_reason for each in own] == ["length", "abort", "length"]
    assert life.scheduler.completions.further == {}
    assert life.kv.blocks.pool.num_used == 0
