"""The ground floor: what no milestone changes."""

import os

MILESTONES = ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels")
"""The packages that stand on this one, each on those before it."""

NUM_SPINS = 10_000
"""How often a thread of torch's looks before it sleeps. GNU's OpenMP has 300,000, milliseconds in
which other programs miss the core; with 1,000 it sleeps between two products of a layer, and to
wake it takes longer than a small product. torch must be told before it is imported. Whoever has
chosen how threads wait is obeyed."""
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))
