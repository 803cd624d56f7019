"""Models: where they come from, and which of them can be served."""
