"""The ground floor: what no milestone changes."""

import os

MILESTONES = ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels")
"""The packages that stand on this one, each on those before it."""

NUM_SPINS = 1_000
"""How often a thread of torch's looks before it sleeps; GNU's OpenMP has 300,000, some milliseconds
long. They must be told before torch is imported. Whoever has chosen how threads wait is obeyed."""
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))
