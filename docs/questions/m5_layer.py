"""Bytes of a layer's nine launches with one row and with 64. Arithmetic, in bfloat16.

`docs/images/m5_layer.svg` has each launch by itself.
"""

HIDDEN, Q, KV, INNER = 1024, 16 * 128, 8 * 128, 3072  # Qwen3-0.6B's; Q and KV: heads x head_dim
CONTEXT, GB_A_SECOND = 600, 4480
LAUNCHES = {  # numbers: of weights, of KV, read besides, written
    "QKV": (HIDDEN * (Q + 2 * KV), 0, HIDDEN, Q + 2 * KV),
    "rope_kv_write": (0, 0, Q + 2 * KV, Q + 2 * KV),  # queries; keys and values to their slot
    "flash_decode": (0, CONTEXT * 2 * KV, Q, Q),
    "output": (Q * HIDDEN, 0, Q, HIDDEN),
    "add_rms_norm": (0, 0, 2 * HIDDEN, 2 * HIDDEN),  # the residual stream, and its norm
    "gate, up": (HIDDEN * 2 * INNER, 0, HIDDEN, 2 * INNER),
    "silu_mul": (0, 0, 2 * INNER, INNER),
    "down": (INNER * HIDDEN, 0, INNER, HIDDEN),
    "add_rms_norm, again": (0, 0, 2 * HIDDEN, 2 * HIDDEN),
}


def size(num_bytes: float) -> str:
    """Return a size in words."""
    kib = num_bytes / 1024
    return f"{kib / 1024:.1f} MiB" if kib >= 1000 else f"{kib:.0f} KiB"


weights, kv, reads, writes = (2 * sum(column) for column in zip(*LAUNCHES.values(), strict=True))
for rows in (1, 64):
    parts = (weights, rows * kv, rows * (reads + writes))
    what = "weights {}, KV {}, the rest {}".format(*map(size, parts))
    us = sum(parts) / GB_A_SECOND / 1e3
    print(f"rows: {rows:2}   {what}: {us:.1f} us at {GB_A_SECOND:,} GB/s")
