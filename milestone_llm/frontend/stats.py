"""What `LLMEngine.stats` says: counts since the start, and the state of queues and KV memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .step_log import StepLog


def engine_stats(log: StepLog, bytes_per_token: int | None) -> dict[str, Any]:
    """One dictionary of all that an engine counts.

    Args:
        bytes_per_token: of keys and values, in all layers.
    """
    counts, scheduler = log.counts, log.scheduler
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
