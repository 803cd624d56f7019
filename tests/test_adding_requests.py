"""To add a request takes the same work however many wait, and however many are not delivered."""

from __future__ import annotations

from typing import Any

from helpers.engines import every_milestone, greedy, make_engine
from helpers.interrupter import Interrupter

SEARCH = 16
"""Lines for the search in a sorted queue: a few more each time that twice as many wait."""


def lines_to_add(engine: Any) -> int:
    """Lines of ours that run while a request is added; each pass of a loop counts."""
    with Interrupter(at=-1) as counting:
        engine.add_request([3, 4, 5], greedy(1))
    return counting.num_lines


@every_milestone
def test_to_add_a_request_is_the_same_work_however_many_there_are(package):
    engine = make_engine(package, max_model_len=16, check_invariants=False, max_num_seqs=64)
    lines_to_add(engine)  # what is done once
    few = lines_to_add(engine)
    for _ in range(190):
        engine.add_request([3, 4, 5], greedy(1))
    assert lines_to_add(engine) <= few + SEARCH, "however many wait"
    while engine.output_processor.states:
        engine.driver.run(engine.driver.step)  # `step` without taking what it brought
    assert len(engine._step_queue) > 190
    assert lines_to_add(engine) <= few + SEARCH, "however many outputs are not delivered"
