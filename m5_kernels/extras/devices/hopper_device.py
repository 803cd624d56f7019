"""Is a GPU a Hopper, and can its copy engine take some rows?"""

from __future__ import annotations

import functools

import torch

from m5_kernels.kernels.pdl import supports_pdl


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the kernels in Gluon can run on this GPU: only on NVIDIA's Hopper."""
    return supports_pdl(device) and torch.cuda.get_device_capability(device) == (9, 0)


def fits_copy_engine(hidden: torch.Tensor, *sizes: int) -> bool:
    """Return whether Hopper's copy engine, which moves 16 bytes at a time, can copy these rows in
    bf16.

    sizes: lengths of the rows of other matrices, in elements.
    """
    is_aligned = hidden.data_ptr() % 16 == 0 and not any(
        size % 8 for size in (hidden.stride(0), *sizes)
    )
    return hidden.dtype == torch.bfloat16 and is_aligned and is_hopper(hidden.device)
