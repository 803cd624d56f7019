"""Models: where they come from, and what they must be like to be served."""
