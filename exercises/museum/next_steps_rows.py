"""Answers are wrong when the machine is busy. With prints in the code they are right."""

from __future__ import annotations

import torch

from .exhibit import Arrival, Exhibit, greedy
from .invariants import equal_prompts_agree
from .slow_device import SlowState, SlowStep, slow_fetch

PROMPT = [23, 42, 17]


BUFFER = torch.zeros(2, 4096, dtype=torch.int64)


def in_host_memory(self: SlowState, pairs: torch.Tensor) -> torch.Tensor:
    """Return pinned memory that a copy can start from. Pinning is slow, so it is done once."""
    own = BUFFER[:, : pairs.shape[1]]
    return own.copy_(pairs)


EXHIBIT = Exhibit(
    milestone="m5_kernels",
    place="exercises.museum.slow_device.SlowState.in_host_memory",
    broken=in_host_memory,
    both={
        "m5_kernels.runner.DeviceStep": SlowStep,
        "m5_kernels.runner.DeviceState": SlowState,
        "m5_kernels.runner.fetch": slow_fetch,
    },
    traffic=[
        Arrival(0, "a", PROMPT, greedy(3)),
        Arrival(4, "b", PROMPT, greedy(3)),
        Arrival(4, "long", list(range(50, 70)), greedy(3)),
        Arrival(9, "c", PROMPT, greedy(3)),
    ],
    invariant=equal_prompts_agree,
    config={"async_scheduling": True},
    setting="Both run on a device that falls behind in steps of more than 16 tokens.",
    text="""
question: a, b and c send the same prompt; b comes together with a long one. Its plan is right,
  its blocks are its own. With a long prompt of 10 tokens instead of 20, b is right, too. What does
  the length of another's prompt change for b?
cause: An asynchronous copy reads its source when the device comes to it, not when it is queued.
  Step 3 takes long. Meanwhile the host writes the rows of step 4 into the same memory: step 3 is
  computed with parts of step 4. In M5 as you know it, this is in `DeviceState.flush`.
invariant: Memory that a queued copy will read is not written. A request's tokens do not depend
  on what comes a step later.
fix: Fresh pinned memory for each step; the caching host allocator gives it out again when the
  copy is done.
test:
  tests/exercises/test_museum.py::test_a_device_that_is_behind_computes_with_what_was_sent_for_the_step
seen: One pinned buffer was filled anew for each step, while the copy of the step before still
  waited in the device's queue.
threads: NVIDIA/TensorRT-LLM#15546 (merged), lightseekorg/tokenspeed#376 (merged),
  sgl-project/sglang#26380 (merged)
""",
    walk="""
call exercises/museum/next_steps_rows.py::in_host_memory, when len(self.queue) > 0
The device has not come to what is queued.
p len(self.queue)  # copies and steps that wait
p BUFFER[:, :4].tolist()  # places and values that the first of them will read
Try `n`, `n` and `p BUFFER[:, :4].tolist()` again: what will it read now?
""",
)
