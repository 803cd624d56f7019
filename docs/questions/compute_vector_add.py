"""A first kernel: c = a + b in Triton. `TRITON_INTERPRET=1` runs it without a GPU, in Python."""

import os
import sys

import torch
import triton
import triton.language as tl

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    sys.exit("torch.cuda finds no GPU. With TRITON_INTERPRET=1 before the command it runs without.")


@triton.jit
def add_kernel(a, b, c, length, TILE: tl.constexpr):  # noqa: N803
    program = tl.program_id(0)  # which program of this launch is this?
    places = program * TILE + tl.arange(0, TILE)  # the elements of this program
    mask = places < length  # the last program has fewer
    total = tl.load(a + places, mask=mask) + tl.load(b + places, mask=mask)
    tl.store(c + places, total, mask=mask)


device = "cuda" if torch.cuda.is_available() else "cpu"
a, b = torch.arange(10.0, device=device), torch.full((10,), 100.0, device=device)
c = torch.empty_like(a)
add_kernel[(3,)](a, b, c, len(a), TILE=4)  # one launch of three programs
print(c.tolist())
print("as PyTorch adds:", torch.equal(c, a + b))
