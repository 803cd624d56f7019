"""Tensor parallelism: processes with a GPU each share one model, and compute the same steps."""
