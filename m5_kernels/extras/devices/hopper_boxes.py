"""What kernels for Hopper share: how the copy engine (TMA) sees a tensor, and a barrier's name."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""Rows of 64 numbers: the widest box that the copy engine can swizzle against bank conflicts."""
NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
"""Rows of 32 numbers."""
all_threads = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since 3.7


def boxes(matrix: torch.Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Return a descriptor with which the copy engine loads or stores boxes of a matrix.

    What it loads from outside of the matrix is zeros.
    """
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)
