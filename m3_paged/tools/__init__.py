"""Instruments: programs that measure and draw M3. `python -m m3_paged.NAME` runs them; no step does."""
