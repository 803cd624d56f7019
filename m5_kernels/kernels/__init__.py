"""Triton kernels, one idea a file, each with its torch twin (`*_torch`)."""
