"""The course of M0: the parts of a Llama."""
