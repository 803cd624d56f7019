"""What does a full pass of Python's garbage collector look through, before and after a freeze?"""

import gc
import time

import m5_kernels.engine  # noqa: F401 - brings torch and transformers along


def full_collection() -> str:
    """Objects that a full collection looks through, and its time."""
    gc.collect()
    start = time.perf_counter()
    gc.collect()
    milliseconds = 1e3 * (time.perf_counter() - start)
    return f"{len(gc.get_objects()):9,} objects  {milliseconds:6.1f} ms"


print("as imported      ", full_collection())
gc.freeze()
print("after gc.freeze()", full_collection())
