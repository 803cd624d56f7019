"""Instruments: programs that measure and tune M5's kernels. `python -m m5_kernels.NAME` runs them; no step does."""
