"""Several processes with one engine: who they are, and how they stay alike."""
