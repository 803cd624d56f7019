"""What does a prompt in a step cost those who decode, and what does sending its KV take?

The playground's formula, for Qwen3-8B on an H100 (its shares of the data sheet are assumed).
"""

from milestone_llm.lab.playground.gpus import gpu_machine

ROWS, CONTEXT, LINK = 32, 1024, 50e9  # bytes a second: a network card of 400 Gbit

machine = gpu_machine("h100", "qwen3-8b")
print(f"32 rows that decode, {CONTEXT:,} tokens of context each; a link of {LINK / 1e9:.0f} GB/s\n")
print("tokens of a prompt   step of the rows, ms   KV of the prompt, MB   sent in, ms")
for chunk in (0, 256, 512, 2048, 8192):
    scores, read = ROWS * CONTEXT + chunk**2 / 2, ROWS * CONTEXT + chunk
    step = machine.step_seconds(ROWS + chunk, ROWS + (chunk > 0), scores, read)
    size = machine.kv_bytes * chunk
    print(f"{chunk:18,}{1e3 * step:23.1f}{size / 1e6:23.0f}{1e3 * size / LINK:14.1f}")
