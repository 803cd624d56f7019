"""Attention of decode rows: one call for each row, or one masked call for all? Measured here.

One layer of SmolLM2's shape (9 query heads, 3 KV heads of 64), one thread, CPU time.
"""

import time

import torch
import torch.nn.functional as F

NUM_KV_HEADS, GROUP, HEAD_DIM = 3, 3, 64

torch.set_num_threads(1)


def cpu_us(call) -> float:
    """Return the CPU time of a call in microseconds."""
    for _ in range(5):
        call()
    start = time.process_time()
    for _ in range(50):
        call()
    return 1e6 * (time.process_time() - start) / 50


def compare(contexts: list[int]) -> tuple[float, float]:
    """Return microseconds of one call for each row, with its own length, and of one masked call."""
    size = (len(contexts), NUM_KV_HEADS, max(contexts), HEAD_DIM)
    keys, values = torch.randn(size), torch.randn(size)
    query = torch.randn(len(contexts), NUM_KV_HEADS, GROUP, HEAD_DIM)
    mask = torch.arange(max(contexts)) < torch.tensor(contexts)[:, None]

    def row_by_row() -> torch.Tensor:
        rows = [
            F.scaled_dot_product_attention(
                query[i : i + 1], keys[i : i + 1, :, :end], values[i : i + 1, :, :end]
            )
            for i, end in enumerate(contexts)
        ]
        return torch.cat(rows)

    def masked() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, keys, values, mask[:, None, None, :])

    torch.testing.assert_close(row_by_row(), masked())
    return cpu_us(row_by_row), cpu_us(masked)


print("contexts                          row by row    one masked call")
for what, contexts in (
    ("16 rows of 64", [64] * 16),
    ("16 rows of 32, 48, ... 272", list(range(32, 288, 16))),
    ("15 rows of 32 and one of 4096", [32] * 15 + [4096]),
):
    by_row, masked_call = compare(contexts)
    print(f"{what:30}{by_row:11,.0f} us{masked_call:16,.0f} us")
