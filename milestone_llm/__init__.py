"""The ground floor: what no milestone changes."""

MILESTONES = ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels")
"""The packages that stand on this one, each on those before it."""
