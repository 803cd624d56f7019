"""How small may a pool be? Smaller is refused, with the numbers, before anything runs."""

import textwrap

from m3_paged import LLMEngine

for fields in (
    {"max_model_len": 256, "kv_cache_tokens": 200},
    {"max_model_len": 256, "kv_cache_tokens": 256, "max_num_batched_tokens": 128},
    {"max_model_len": 256, "kv_cache_tokens": 256},
):
    print(", ".join(f"{name}={value}" for name, value in fields.items()))
    try:
        engine = LLMEngine("tiny-llama", device="cpu", **fields)
        output = engine.generate([5] * 255)[0]
        print(f"    runs: {len(output.prompt_token_ids)} tokens in, {len(output.token_ids)} out")
    except ValueError as error:
        print(textwrap.indent(textwrap.fill(f"ValueError: {error}", 76), "    "))
