"""Instruments: programs that draw a trace. `python -m m1_single.NAME` runs them; no step does."""
