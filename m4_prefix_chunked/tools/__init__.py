"""Instruments that stress and measure: `python -m m4_prefix_chunked.NAME`. No step runs them."""
