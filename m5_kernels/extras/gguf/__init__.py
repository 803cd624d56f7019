"""Weights in the 4 or 8 bits that a GGUF file has, for CPUs (`quantization="gguf"`).

file          which bytes of the file are which weight
packed        a weight in 4-bit integers, and its product
gguf_linear   linear layers with such weights
"""
