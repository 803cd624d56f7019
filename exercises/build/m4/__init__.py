"""The course of M4: a prefix cache, and prompts computed in chunks."""
