"""How many bits does a weight take in a file, scales included?"""

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

print("format                                     weights a block   bits a weight")
for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K", "MXFP4"):
    length, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    print(f"GGUF {name:38}{length:15}{8 * size / length:16.2f}")
OTHERS = {  # bits of a weight, weights that share a scale, bits of scale and zero point
    "fp8, a scale a block of 128 x 128": (8, 128 * 128, 32),
    "GPTQ, AWQ: 4 bits, groups of 128": (4, 128, 16 + 4),
    "compressed-tensors: 4 bits, symmetric": (4, 128, 16),
    "MXFP4: e2m1, a power of two": (4, 32, 8),
    "NVFP4: e2m1, a scale in e4m3": (4, 16, 8),
}
for title, (bits, group, scale) in OTHERS.items():
    print(f"{title:43}{group:15,}{bits + scale / group:16.2f}")
