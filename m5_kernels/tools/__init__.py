"""What measures and tunes kernels: `python -m m5_kernels.tools.NAME`. No step runs it."""
