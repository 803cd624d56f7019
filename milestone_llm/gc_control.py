"""Keep the garbage collector away from objects that live long: libraries, models, engines.

The collector would look through all their objects now and then, which stops a fast engine for some
0.2 s. A program freezes them, for good and for the whole process. An engine does not freeze. It
only keeps the collector from old objects while it generates: objects that are frozen and thawed
count as old at once, and the collector would hardly ever look at them again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NEVER = 2**31 - 1


def freeze_gc_heap() -> None:
    """Exclude the objects that exist now from garbage collection, for good."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection inside the block, for instance while much is imported or built that
    stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def gc_young_only() -> Iterator[None]:
    """Collect only new objects inside the block; old objects have their turn afterwards."""
    young, middle, old = gc.get_threshold()
    if old == _NEVER:  # another thread generates, and will restore the thresholds
        yield
        return
    try:
        gc.set_threshold(young, middle, _NEVER)
        yield
    finally:
        gc.set_threshold(young, middle, old)
