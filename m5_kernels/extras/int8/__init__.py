"""Weights in eight bits: what a matrix is (`int8_weight`), and products with it (`products`)."""
