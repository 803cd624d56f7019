"""Who owns which KV slot (layout SLOT). Pure bookkeeping, no tensors.

slot 0  |a a a a a a a a . . . . . . . . . . . .|   request a: 8 tokens stored,
slot 1  |b b b . . . . . . . . . . . . . . . . .|   max_model_len reserved
slot 2  |- - - - - - - - - - - - - - - - - - - -|   free
         0                        max_model_len - 1
"""

from __future__ import annotations

import heapq

from milestone_llm.trace.tracer import KVEvent


class SlotManager:
    """Hands out one slot a request, the lowest free one, so that used slots stay close together."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))
        self.owners: dict[str, int] = {}
        """Slot of each request that has one."""
        self.watermark = 0
        self.events: list[KVEvent] = []

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a slot is free; each holds `max_model_len` tokens, however few are needed."""
        return bool(self.free_slots)

    def describe(self, num_tokens: int) -> str:
        """How much is wanted and how much there is, for people."""
        return f"a request needs a slot, {len(self.free_slots)} of {self.num_slots} are free"

    def blocks_of(self, request_id: str) -> list[int]:
        """The slot a request owns, as a list of one."""
        return [self.owners[request_id]]

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a request the lowest free slot."""
        slot = heapq.heappop(self.free_slots)
        self.owners[request_id] = slot
        self.watermark = max(self.watermark, len(self.owners))
        self.events.append(KVEvent("alloc", request_id, [slot]))

    def free(self, request_id: str) -> None:
        """Take a request's slot back."""
        slot = self.owners.pop(request_id)
        heapq.heappush(self.free_slots, slot)
        self.events.append(KVEvent("free", request_id, [slot]))

    def check_invariants(self) -> None:
        """Assert that every slot is either free or owned by exactly one request."""
        owned = list(self.owners.values())
        assert sorted(owned + self.free_slots) == list(range(self.num_slots)), (
            f"slots lost or owned twice: owned {sorted(owned)}, free {sorted(self.free_slots)}"
        )
