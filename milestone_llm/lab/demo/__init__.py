"""The demos' common parts: command line, workload, and output."""
