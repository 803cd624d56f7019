"""Instruments that draw and compare KV memory: `python -m m3_paged.NAME`. No step runs them."""
