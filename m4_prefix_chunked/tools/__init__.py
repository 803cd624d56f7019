"""Tools of M4's demo, and the stress test: `python -m m4_prefix_chunked.tools.stress`."""
