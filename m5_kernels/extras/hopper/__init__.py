"""Kernels for NVIDIA's Hopper: linear layers, prefill in Gluon, early starts (PDL).

few_rows_linear   which of these kernels a linear layer uses, and when kernels start
  register_linear, hopper_linear, dot_linear
hopper_chunks     attention of long chunks
  prefill_tiles, hopper_prefill, hopper_consumers
write_to_host     a kernel brings tokens to the host

`dot_linear` and `write_to_host` also run on other GPUs, wherever Triton does.
"""
