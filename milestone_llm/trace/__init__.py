"""Traces: one record for each step, kept, printed or written to a file."""
