"""Instruments that draw a trace: `python -m m1_single.NAME`. No step runs them."""
