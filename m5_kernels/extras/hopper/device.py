"""Whether a GPU is a Hopper, and its copy engine can take some rows."""

from __future__ import annotations

import functools

import torch

from m5_kernels.kernels.early_start import supports_early_starts


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU is one that kernels in Gluon are written for: NVIDIA's Hopper alone."""
    return supports_early_starts(device) and torch.cuda.get_device_capability(device) == (9, 0)


def fits_copy_engine(hidden: torch.Tensor, *sizes: int) -> bool:
    """Whether Hopper's copy engine, which moves 16 bytes, copies these rows in bf16.

    sizes: of rows of other matrices, in elements.
    """
    is_aligned = hidden.data_ptr() % 16 == 0 and not any(
        size % 8 for size in (hidden.stride(0), *sizes)
    )
    return hidden.dtype == torch.bfloat16 and is_aligned and is_hopper(hidden.device)
