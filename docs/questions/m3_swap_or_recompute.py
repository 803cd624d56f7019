"""A preempted request comes back: is it quicker to compute its KV again, or to copy it back?

By arithmetic, for an H200 that multiplies at 700 TFLOP/s and reads 4.4 TB/s, and a bus of 50 GB/s
to host memory. Computing a prompt reads all weights once; swapping copies KV out and in again.
"""

FLOPS, READ, BUS = 700e12, 4.4e12, 50e9

print("                      KV per token     tokens   compute again, ms   out and in, ms")
for name, num_weights, num_layers, num_q_heads, num_kv_heads in (
    ("Qwen3-0.6B", 0.44e9, 28, 16, 8),
    ("Qwen3-8B", 7.6e9, 36, 32, 8),
    ("Llama-2-7B, no GQA", 6.6e9, 32, 32, 32),
):
    kv_bytes = num_layers * num_kv_heads * 128 * 2 * 2  # keys and values, two bytes each
    for num_tokens in (128, 2048, 16_384):
        attention = 2 * num_tokens**2 * num_layers * num_q_heads * 128  # causal: half of the scores
        compute = (2 * num_weights * num_tokens + attention) / FLOPS
        again = max(compute, 2 * num_weights / READ)
        copied = 2 * kv_bytes * num_tokens / BUS
        print(
            f"{name:20}{kv_bytes / 1024:10.0f} KiB{num_tokens:11,}"
            f"{1e3 * again:20.1f}{1e3 * copied:17.1f}"
        )
