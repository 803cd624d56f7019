"""Who owns which KV slot (layout SLOT). Pure bookkeeping, no tensors.

slot 0  |a a a a a a a a . . . . . . . . . . . .|   request a: 8 tokens stored,
slot 1  |b b b . . . . . . . . . . . . . . . . .|   max_model_len reserved
slot 2  |- - - - - - - - - - - - - - - - - - - -|   free
         0                        max_model_len - 1
"""

from __future__ import annotations

import heapq

from m1_single.tracer import KVEvent


class SlotManager:
    """Hands out one slot a request, the lowest free one, so that used slots stay close together."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))
        self.slot_of: dict[str, int] = {}
        self.watermark = 0
        self.events: list[KVEvent] = []

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self.free_slots)

    def allocate(self, request_id: str) -> int:
        """Give a request the lowest free slot."""
        slot = heapq.heappop(self.free_slots)
        self.slot_of[request_id] = slot
        self.watermark = max(self.watermark, len(self.slot_of))
        self.events.append(KVEvent("alloc", request_id, [slot]))
        return slot

    def free(self, request_id: str) -> None:
        """Take a request's slot back."""
        slot = self.slot_of.pop(request_id)
        heapq.heappush(self.free_slots, slot)
        self.events.append(KVEvent("free", request_id, [slot]))

    def check_invariants(self) -> None:
        """Assert that every slot is either free or owned by exactly one request."""
        owned = list(self.slot_of.values())
        assert sorted(owned + self.free_slots) == list(range(self.num_slots)), (
            f"slots lost or owned twice: owned {sorted(owned)}, free {sorted(self.free_slots)}"
        )
