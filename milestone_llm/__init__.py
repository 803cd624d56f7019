"""The ground floor: what no milestone changes."""

from .models.threads import let_waiting_threads_sleep

MILESTONES = ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels")
"""The packages that stand on this one, each on those before it."""

let_waiting_threads_sleep()  # before anybody imports torch
