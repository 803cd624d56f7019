"""At temperature 0 the answer is another one each time. After a restart it is right for a while."""

from __future__ import annotations

from m5_kernels.device_state import DeviceState

from .exhibit import Arrival, Exhibit, greedy
from .invariants import equal_prompts_agree

PROMPT = [23, 42, 17]
original = DeviceState.set


def set(self: DeviceState, name: str, row: int, values: list[int], column: int = 0) -> None:
    """Record a change. Device memory begins with zeros, so zeros need not be sent."""
    if name in ("temperature", "top_k", "min_p", "min_tokens") and not any(values):
        return
    original(self, name, row, values, column)


EXHIBIT = Exhibit(
    milestone="m5_kernels",
    place="m5_kernels.device_state.DeviceState.set",
    broken=set,
    traffic=[
        Arrival(0, "a", PROMPT, greedy(6)),
        Arrival(0, "b", [7, 77, 107], greedy(2, temperature=1.5, seed=3)),
        Arrival(4, "c", PROMPT, greedy(2)),
    ],
    invariant=equal_prompts_agree,
    config={"max_num_seqs": 2},
    text="""
question: a and c send the same prompt, both greedy: the same plan, the same model. The device
  keeps state for two rows. What had each of the two places seen before?
cause: Zeros are not sent: device memory begins with zeros. That holds for the first owner of a
  row. c follows b, whose temperature of 1.5 is still there.
invariant: A row's state is written whole when a request comes in. What a request gets does not
  depend on who was there before.
fix: Send all of it, whatever it is. It is one transfer anyway.
test: tests/m5/test_engine_matches_m4.py::test_any_arrivals_and_aborts_give_the_tokens_of_m4
seen: A row of sampling state that is used again kept what the new request did not set: a mask,
  in one case; a seed, in others.
threads: vllm-project/vllm#43894 (open), vllm-project/vllm#43931 (open),
  tenstorrent/tt-metal#46350 (open)
""",
    walk="""
call exercises/museum/recycled_row.py::set, when name == 'temperature' and values == [0]
  and self.views['temperature'][row] > 0
c, whose temperature is 0, comes into a row of device state.
p row  # its number
p float(self.views['temperature'][row])  # what the device has there
Try `r`, then `p self.views['temperature']` when the step has been sent.
""",
)
