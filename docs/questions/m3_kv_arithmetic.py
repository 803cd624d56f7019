"""How much memory does one token's KV take, and how many requests does that leave room for?"""

import torch

from milestone_llm.models.kv_shape import KVShape

HALF = torch.bfloat16
SHAPES = {  # layers, KV heads, head size: from the models' published configs
    "SmolLM2-135M": KVShape(30, 3, 64, 64, HALF),
    "Qwen3-0.6B": KVShape(28, 8, 128, 128, HALF),
    "Llama-3.1-8B": KVShape(32, 8, 128, 128, HALF),
    "OPT-13B": KVShape(40, 40, 128, 128, HALF),
}
MAX_MODEL_LEN, TYPICAL_LEN, BLOCK_SIZE, MEMORY = 4096, 500, 16, 10 * 2**30

print("bytes per token = 2 (key, value) x layers x KV heads x head size x 2 (bfloat16)\n")
print("                                          requests in 10 GiB that store 500 tokens each")
print("            bytes per token  tokens a GiB  in regions of 4096    in blocks of 16")
for name, shape in SHAPES.items():
    size = shape.bytes_per_token
    num_blocks = MEMORY // (BLOCK_SIZE * size)
    in_regions = MEMORY // (MAX_MODEL_LEN * size)
    in_blocks = num_blocks // -(-TYPICAL_LEN // BLOCK_SIZE)
    print(f"{name:14}{size:13,}{2**30 // size:14,}{in_regions:20}{in_blocks:19}")
