"""MHA, GQA and MQA: bytes of KV for the same query heads."""

print("KV of one token, head_dim 128, 2 bytes a number: 2 x layers x KV heads x 128 x 2")
print("                     query heads   KV heads  bytes per token   tokens in 10 GiB")
for name, layers, query_heads, kv_heads in (
    ("Qwen3-0.6B's (GQA)", 28, 16, 8),
    ("  the same, MHA", 28, 16, 16),
    ("  the same, MQA", 28, 16, 1),
    ("Qwen3-8B's (GQA)", 36, 32, 8),
    ("  the same, MHA", 36, 32, 32),
):
    num_bytes = 2 * layers * kv_heads * 128 * 2
    print(f"{name:21}{query_heads:11}{kv_heads:11}{num_bytes:17,}{10 * 2**30 // num_bytes:19,}")
