"""M5: the same schedule and cache as M4, computed by Triton kernels, a fused decoder and CUDA graphs."""
