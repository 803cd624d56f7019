"""Python's garbage collector, kept from libraries, models and engines: they are no garbage.

It would look through all their objects now and then, which stops a fast engine for some 0.2 s. What
is frozen concerns the whole process: a program freezes for good, an engine only while it generates.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def freeze_garbage() -> None:
    """Exclude the objects that exist now from garbage collection, for good."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Within, the collector rests: while much is imported or built that stays, for instance."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def garbage_frozen() -> Iterator[None]:
    """Within, the collector looks at new objects alone.

    Python can only unfreeze all objects at once. So what the program has frozen stays as it is.
    """
    is_free = gc.get_freeze_count() == 0
    try:
        if is_free:
            gc.freeze()
        yield
    finally:
        if is_free:
            gc.unfreeze()
