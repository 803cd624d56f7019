"""How much does one step compute and read? Arithmetic on a real model's config.

A linear layer of N weights costs 2 N floating-point operations per token: a multiplication and an
addition each. A step reads every weight once, for any number of tokens, and the KV of every row's
context.
"""

from milestone_llm.models.checkpoint import load_model
from milestone_llm.models.kv_shape import KVShape

model = load_model("smollm2-135m", dtype="float32", device="cpu").model
config, kv = model.config, KVShape.of(model)
num_weights = sum(weight.numel() for weight in model.parameters())
num_head_weights = config.vocab_size * config.hidden_size  # the LM head, tied to the embedding
num_layer_weights = num_weights - num_head_weights

print(f"SmolLM2-135M in float32: {num_weights:,} weights, {num_weights * 4 / 1e6:.0f} MB")
print(f"KV cache: {kv.bytes_per_token:,} bytes per token\n")
print("a step of                            GFLOP   MB read   FLOP per byte read")
for what, rows, new_tokens, context in (
    ("a prompt of 512 tokens", 1, 512, 512),
    ("1 row, 1 token, context 512", 1, 1, 512),
    ("8 rows, 1 token each, context 512", 8, 1, 512),
    ("64 rows, 1 token each, context 512", 64, 1, 512),
):
    # Only the last token of a row goes through the LM head.
    flop = 2 * rows * (num_layer_weights * new_tokens + num_head_weights)
    # Attention: query times keys, and weights times values. A prompt's token attends to half of it
    # on average.
    seen = context if new_tokens == 1 else context / 2
    flop += 4 * rows * new_tokens * seen * config.hidden_size * config.num_hidden_layers
    read = 4 * num_weights + rows * context * kv.bytes_per_token
    print(f"{what:36}{flop / 1e9:6.1f}{read / 1e6:10.0f}{flop / read:12.1f}")
