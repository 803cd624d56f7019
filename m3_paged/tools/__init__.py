"""Instruments that draw KV memory: `python -m m3_paged.tools.NAME`. No step runs them."""
