"""Instruments that measure and tune kernels: `python -m m5_kernels.NAME`. No step runs them."""
