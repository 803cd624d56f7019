"""`batch_invariant=True`: every sum in an order that depends on its request alone.

invariant_linear   linear layers: any number of rows, the same order of inputs
  tiled_linear     the kernel for many rows, and the tiles among which it chooses
split_attention    contexts are cut at fixed positions, for a decode row and for a chunk
cpu_invariant      the same on a CPU, by torch

Norms, rotary embedding and sampling need no other objects: their kernels compute each row alone.
"""
