"""Models: how they are loaded, and which of them can be served."""
