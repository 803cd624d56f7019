"""What the demo shows, and the stress test: `python -m m4_prefix_chunked.tools.stress`."""
