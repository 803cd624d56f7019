"""Weights in the few bits in which a GGUF file has them, for CPUs (`quantization="gguf"`).

file      which bytes of the file are which weight
packed    a matrix of words of four bits, and products with it
matrices  fills a decoder's matrices with them
"""
