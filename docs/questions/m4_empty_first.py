"""What it brings to give out blocks without findable content first: random traffic, both orders."""

from __future__ import annotations

from unittest import mock

from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.tools.vllm.compare import drive
from m4_prefix_chunked.tools.vllm.run_m4 import M4Run
from m4_prefix_chunked.tools.vllm.traffic import draw

NUM_RUNS = 150
free = CachingBlockPool.free


def longest_free_first(self: CachingBlockPool, block: int) -> None:
    """Free a block as M3 does: after all others, also if it holds nothing to find."""
    free(self, block)
    if not self.ref_counts[block]:
        self.free_blocks.move_to_end(block)


def figures() -> list[int]:
    """Steps, cached tokens, evictions and preemptions of all runs."""
    total = [0, 0, 0, 0]
    for seed in range(5000, 5000 + NUM_RUNS):
        traffic = draw(seed, policy="fcfs", enable_prefix_caching=True, enable_chunked_prefill=True)
        run = M4Run(traffic.limits)
        steps = [step for (step,) in drive(traffic, run)]
        num_evictions = run.scheduler.kv.pool.num_evictions
        num_preempted = sum(len(step.preempted) for step in steps)
        found = len(steps), run.num_cached_tokens, num_evictions, num_preempted
        total = [a + b for a, b in zip(total, found, strict=True)]
    return total


print(f"{NUM_RUNS} random runs        steps  cached tokens  evictions  preemptions")
with mock.patch.object(CachingBlockPool, "free", longest_free_first):
    before = figures()
after = figures()
for name, row in (("longest free first", before), ("empty ones first", after)):
    print(f"{name:20}{row[0]:9,}{row[1]:15,}{row[2]:11,}{row[3]:13,}")
change = [f"{b / a - 1:+.1%}" for a, b in zip(before, after, strict=True)]
print(f"{'change':20}{change[0]:>9}{change[1]:>15}{change[2]:>11}{change[3]:>13}")
