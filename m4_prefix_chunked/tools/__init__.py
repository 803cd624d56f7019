"""Instruments: programs that show, stress and measure M4. `python -m m4_prefix_chunked.NAME` runs them; no step does."""
