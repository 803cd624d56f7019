"""SwiGLU with its two products apart, and merged into one: the same numbers; time of both.

A layer of SmolLM2's shape: 576 numbers in, two times 1,536 out.
"""

import time

import torch
import torch.nn.functional as F

HIDDEN, INNER, ROUNDS = 576, 1536, 40

torch.manual_seed(0)
gate_weight, up_weight = torch.randn(2, INNER, HIDDEN).unbind()
merged_weight = torch.cat([gate_weight, up_weight])


def apart(x):
    """Two products."""
    return F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)


def merged(x):
    """One product of twice the width; its output is cut in two."""
    gate, up = F.linear(x, merged_weight).chunk(2, -1)
    return F.silu(gate) * up


def microseconds(function, x) -> float:
    """The best of some calls."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function(x)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


print("tokens       apart      merged   same numbers")
for num_tokens in (1, 4, 16, 64):
    x = torch.randn(num_tokens, HIDDEN)
    times = f"{microseconds(apart, x):9,.0f} us{microseconds(merged, x):9,.0f} us"
    is_same = torch.allclose(apart(x), merged(x), rtol=1e-4, atol=1e-2)
    print(f"{num_tokens:6}{times}   {is_same}")
