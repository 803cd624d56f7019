"""Weights in 8 bits: the weight (`int8_weight`), and its linear layers (`int8_method`)."""
