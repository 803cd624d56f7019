"""The museum: mend a race, with two buffers.

`python -m exercises.museum 13` shows M5 on a device that falls behind. What a step sends is written
into one buffer of pinned memory, and copied from there when the device comes to it. By then the
host has written the next step into the same buffer.

M5 itself takes fresh pinned memory for each step. Mend the exhibit in another way: with two
buffers, which are made once. The device may be behind by one step, not more: before the host sends
step n + 2 it has waited for step n. (`core/engine_core.py`: one step may stay in flight.)

- No memory that a queued copy will read is written.
- There are at most two buffers, each made once: pinning is slow.
- A step may send more than a buffer holds (512 changes). Only then a larger one may take the place
  of that buffer, and nothing that is queued may be lost by it.

    python -m pytest tests/exercises/test_museum_two_buffers.py
"""

from __future__ import annotations

import torch

from exercises.museum.slow_device import SlowState

BUFFER_SIZE = 512


class TwoBuffers(SlowState):
    """Device state whose changes wait in one of two buffers."""

    def in_host_memory(self, pairs: torch.Tensor) -> torch.Tensor:
        """A view of the buffer with the changes in it: places and values `[2, num_changes]`.

        Hint: `self.pinned(size)` makes a buffer, `[2, size]`. `reset` is called by the constructor,
        and again when all requests are forgotten; what you keep may begin there, or here by
        `vars(self).setdefault(...)`.
        """
        raise NotImplementedError
