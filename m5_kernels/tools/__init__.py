"""Programs that measure and tune kernels: `python -m m5_kernels.tools.NAME`. No step uses them."""
