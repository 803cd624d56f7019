"""KV memory in regions: which request owns which (layout SLOT). Pure bookkeeping, no tensors.

region 0  |a a a a a a a a . . . . . . . . . . . .|   request a: 8 tokens stored,
region 1  |b b b . . . . . . . . . . . . . . . . .|   max_model_len reserved
region 2  |- - - - - - - - - - - - - - - - - - - -|   free
           0                        max_model_len - 1
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.core.request import Request


class KVCacheManager:
    """Hands out one region a request, the lowest free one, so that used ones stay together.

    Args:
        num_regions: how many requests can run at once.
        max_model_len: tokens in a region.
    """

    def __init__(self, num_regions: int, max_model_len: int) -> None:
        self.num_regions = num_regions
        self.max_model_len = max_model_len
        self.events: list[KVEvent] = []
        self.free_regions = list(range(num_regions))
        self.regions: dict[str, int] = {}
        """Region of each request that has one."""

    def __repr__(self) -> str:
        return f"<KVCacheManager {self.regions}, free {sorted(self.free_regions)}>"

    def can_allocate(self, request: Request) -> bool:
        """Whether a region is free; each holds `max_model_len` tokens, however few are needed."""
        return bool(self.free_regions)

    def describe(self, request: Request) -> str:
        """Return how much is wanted and how much there is, in words for people."""
        return f"a request needs a region, {len(self.free_regions)} of {self.num_regions} are free"

    def allocate(self, request: Request) -> None:
        """Give a request the lowest free region, with room for all tokens that it may have."""
        region = heapq.heappop(self.free_regions)
        self.regions[request.request_id] = region
        self.events.append(KVEvent("alloc", request.request_id, [region]))

    def blocks_of(self, request: Request) -> list[int]:
        """Return where the request's KV is: its region."""
        return [self.regions[request.request_id]]

    def free(self, request: Request) -> None:
        """Take back a request's region, if it has one: the next step may use it."""
        if request.request_id in self.regions:
            region = self.regions.pop(request.request_id)
            heapq.heappush(self.free_regions, region)
            self.events.append(KVEvent("free", request.request_id, [region]))

    def reset(self) -> None:
        """Take all regions back, even if the bookkeeping is broken."""
        for request_id, region in self.regions.items():
            self.events.append(KVEvent("free", request_id, [region]))
        self.regions = {}
        self.free_regions = list(range(self.num_regions))

    @property
    def num_used(self) -> int:
        """Regions that requests own."""
        return len(self.regions)

    def usage(self, running: Sequence[Request], watermark: int) -> KVUsage:
        """Return how full KV memory is, in regions: each reserves `max_model_len` tokens."""
        return KVUsage(
            unit="region",
            total=self.num_regions,
            used=self.num_used,
            watermark=watermark,
            reserved_tokens=self.num_used * self.max_model_len,
            stored_tokens=sum(request.num_computed_tokens for request in running),
        )

    def stats(self, running: Sequence[Request]) -> dict[str, object]:
        """Return no figures: M2 has none of its own."""
        return {}

    def check(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """Assert that every region is free or belongs to exactly one running request."""
        owned = list(self.regions.values())
        assert sorted(owned + self.free_regions) == list(range(self.num_regions)), (
            f"regions lost or owned twice: owned {sorted(owned)}, free {sorted(self.free_regions)}"
        )
        names = {request.request_id for request in running}
        assert names == set(self.regions), "regions belong to the running requests"
