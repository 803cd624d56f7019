"""Keep the garbage collector away from what lives long: libraries, models, engines.

It would look through all their objects now and then, which stops a fast engine for some 0.2 s. A
program freezes them, for good and for the whole process. An engine only waits while it generates:
what was frozen and thawed would be old at once, and hardly ever looked at again.
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
    """Within, the collector rests: while much is imported or built that stays, for instance."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def gc_young_only() -> Iterator[None]:
    """Within, the collector looks at new objects alone; what is old has its turn afterwards."""
    young, middle, old = gc.get_threshold()
    if old == _NEVER:  # another thread generates, and sets it back
        yield
        return
    try:
        gc.set_threshold(young, middle, _NEVER)
        yield
    finally:
        gc.set_threshold(young, middle, old)
