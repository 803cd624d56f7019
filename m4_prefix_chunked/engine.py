"""M4's engine: M3's runner under a scheduler that caches prefixes and chunks prompts."""

from __future__ import annotations

from typing import Any, ClassVar

import m3_paged

from .config import EngineConfig
from .scheduler import Scheduler


class LLMEngine(m3_paged.LLMEngine):
    """Prefix caching and chunked prefill over KV blocks."""

    milestone: ClassVar[str] = "m4_prefix_chunked"
    config_class: ClassVar[type[m3_paged.EngineConfig]] = EngineConfig
    useful_kv: ClassVar[int] = 16  # what running requests leave free remembers earlier prefixes

    def build_scheduler(self) -> Scheduler:
        """Scheduling by blocks and by a token budget."""
        num_blocks = self._num_kv_blocks()
        return Scheduler(self.config, self.max_model_len, num_blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, for instance after the weights changed.

        Returns:
            False, with nothing done, while blocks are in use, on the device or by swapped requests
            in host memory: finish or abort the requests first.
        """
        return not self.scheduler.host.owners and self.scheduler.kv.reset()

    def _recover(self) -> None:
        """As before; and nobody is to find a block whose content was no number."""
        self.scheduler.kv.forget_blocks(self.runner.recover())

    def stats(self) -> dict[str, Any]:
        """As before, with `prefix_cache`: queries, hits, hit rate, tokens saved, evictions."""
        stats = super().stats()
        counts = self.scheduler.kv.counts
        queried = counts["queried_tokens"]
        hit_rate = counts["saved_tokens"] / queried if queried else 0.0
        stats["prefix_cache"] = {**counts, "hit_rate": hit_rate}
        return stats
