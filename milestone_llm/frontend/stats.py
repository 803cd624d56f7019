"""What `LLMEngine.stats` says: counts since the start, and the state of queues and KV memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from milestone_llm.core.scheduler import BaseScheduler


def engine_stats(
    counts: dict[str, int], scheduler: BaseScheduler, bytes_per_token: int | None
) -> dict[str, Any]:
    """One dictionary of all that an engine counts.

    Args:
        counts: of steps, rows and tokens, as the loop keeps them.
        bytes_per_token: of keys and values, in all layers.
    """
    useful = counts["prefill_tokens"] + counts["decode_tokens"]
    computed = useful + counts["padding_tokens"]
    kv = scheduler.kv_usage()
    milestone = scheduler.stats()
    return {
        **counts,
        "useful_share": (useful - counts["recomputed_tokens"]) / computed if computed else 1.0,
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        **milestone,
        "kv": {
            **asdict(kv),
            "free": kv.free,
            "bytes_per_token": bytes_per_token,
            **milestone.get("kv", {}),
        },
    }
