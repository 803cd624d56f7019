"""The course of Triton: six kernels, from the sum of a row to paged attention."""
