"""To add a request takes the same work however many wait, and however many are not delivered."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from engine_helpers import every_milestone, greedy, make_engine

SEARCH = 16
"""Calls for the search in a sorted queue: one more each time that twice as many wait."""


class Unscanned(dict[str, Any]):
    """A dict whose entries may be looked up, and not gone through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("gone through")

    keys = values = items = __iter__  # type: ignore[assignment]


def calls_to_add(engine: Any) -> int:
    """Calls of functions while a request is added, those written in C included."""
    num_calls, queue, processor = 0, engine._step_queue, engine.output_processor
    books = queue._outputs, processor.states, processor._completions

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    queue._outputs, processor.states, processor._completions = map(Unscanned, books)
    before = sys.getprofile()
    gc.disable()  # what it calls is none of the request's work
    sys.setprofile(note)
    try:
        engine.add_request([3, 4, 5], greedy(1))
    finally:
        sys.setprofile(before)
        gc.enable()
    now = queue._outputs, processor.states, processor._completions
    queue._outputs, processor.states, processor._completions = (
        {**old, **dict(zip(dict.keys(new), dict.values(new), strict=True))}
        for old, new in zip(books, now, strict=True)
    )
    return num_calls


@every_milestone
def test_to_add_a_request_is_the_same_work_however_many_there_are(package):
    engine = make_engine(package, max_model_len=16, check_invariants=False, max_num_seqs=64)
    calls_to_add(engine)  # what is done once
    few = calls_to_add(engine)
    for _ in range(190):
        engine.add_request([3, 4, 5], greedy(1))
    assert calls_to_add(engine) <= few + SEARCH, "however many wait"
    while engine.output_processor.states:
        engine.driver.step()  # `step` without taking what it brought
    assert len(engine._step_queue) > 190
    assert calls_to_add(engine) <= few + SEARCH, "however many outputs are not delivered"
