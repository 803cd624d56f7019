"""What happened in a step, as one list in the order in which it happened.

A record keeps requests (who came, went, was preempted) and KV memory (`events`) apart. A request's
fate comes just before what it does to its blocks: it is preempted, then its blocks are freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .records import StepRecord

_CAUSES = {
    "admitted": {"alloc", "share"},
    "resumed": {"alloc", "share", "swap_in"},
    "preempted": {"swap_out", "free"},
    "finished": {"free"},
}
"""Events with which the blocks of a request follow what became of it."""


@dataclass(frozen=True)
class Happening:
    """`arrived`, one of `_CAUSES`, or the type of a KV event, which has blocks.

    `release` is a `free` of blocks that others hold still.
    """

    kind: str
    request_id: str | None
    reason: str = ""
    blocks: list[int] = field(default_factory=list)


def happenings(record: StepRecord) -> Iterator[Happening]:
    """All that happened in a step.

    Who has no event follows in the end: an ended request that held no blocks, or all of m1_single.
    """
    yield from (Happening("arrived", name) for name in record.arrived)
    fates = [Happening("preempted", one["request_id"], one["reason"]) for one in record.preempted]
    fates += [Happening("resumed", name) for name in record.resumed]
    fates += [Happening("admitted", name) for name in record.admitted]
    fates += [Happening("finished", one["request_id"], one["reason"]) for one in record.finished]
    for event in record.events:
        for fate in fates:
            if fate.request_id == event.request_id and event.type in _CAUSES[fate.kind]:
                yield fate
                fates.remove(fate)
                break
        own = [block for block in event.blocks if block not in event.held]
        for kind, blocks in ((event.type, own), ("release", event.held)):
            if blocks:
                yield Happening(kind, event.request_id, blocks=blocks)
    yield from fates
