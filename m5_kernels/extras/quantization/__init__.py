"""Weights in few bits, a `LinearMethod` for each kind.

`quantization="int8"`: an integer for each weight, and a scale for each row.

int8_method   linear layers on a GPU; the weight is in `int8_weight`
  int8_linear, hopper_int8
cpu_int8      linear layers on a CPU

`quantization="gguf"`: the 4 or 8 bits that a GGUF file has, on a CPU.

gguf_linear   linear layers; the weight is in `int4_weight`
gguf_file     which bytes of the file are which weight
"""
