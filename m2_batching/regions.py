"""Which request owns which KV region (layout SLOT). Pure bookkeeping, no tensors.

region 0  |a a a a a a a a . . . . . . . . . . . .|   request a: 8 tokens stored,
region 1  |b b b . . . . . . . . . . . . . . . . .|   max_model_len reserved
region 2  |- - - - - - - - - - - - - - - - - - - -|   free
           0                        max_model_len - 1
"""

from __future__ import annotations

import heapq

from milestone_llm.core.kv import KVEvent


class RegionManager:
    """Hands out one region a request, the lowest free one, so that used ones stay together.

    Args:
        events: what happens to regions is appended here.
    """

    def __init__(self, num_regions: int, events: list[KVEvent]) -> None:
        self.num_regions = num_regions
        self.events = events
        self.free_regions = list(range(num_regions))
        self.regions: dict[str, int] = {}
        """Region of each request that has one."""

    def __repr__(self) -> str:
        return f"<RegionManager {self.regions}, free {sorted(self.free_regions)}>"

    def can_allocate(self) -> bool:
        """Whether a region is free; each holds `max_model_len` tokens, however few are needed."""
        return bool(self.free_regions)

    def describe(self) -> str:
        """How much is wanted and how much there is, for people."""
        return f"a request needs a region, {len(self.free_regions)} of {self.num_regions} are free"

    def allocate(self, request_id: str) -> None:
        """Give a request the lowest free region."""
        region = heapq.heappop(self.free_regions)
        self.regions[request_id] = region
        self.events.append(KVEvent("alloc", request_id, [region]))

    def free(self, request_id: str) -> None:
        """Take a request's region back."""
        region = self.regions.pop(request_id)
        heapq.heappush(self.free_regions, region)
        self.events.append(KVEvent("free", request_id, [region]))

    def reset(self) -> None:
        """Take all regions back, in whatever state the books are."""
        for request_id, region in self.regions.items():
            self.events.append(KVEvent("free", request_id, [region]))
        self.regions = {}
        self.free_regions = list(range(self.num_regions))

    def check_invariants(self) -> None:
        """Assert that every region is either free or owned by exactly one request."""
        owned = list(self.regions.values())
        assert sorted(owned + self.free_regions) == list(range(self.num_regions)), (
            f"regions lost or owned twice: owned {sorted(owned)}, free {sorted(self.free_regions)}"
        )
