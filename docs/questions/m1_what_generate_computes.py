"""What does `model.generate` compute when it gets a list of prompts?

A hook on the model records the shape of every forward pass. The rest is plain transformers.
"""

import sys

import torch

from milestone_llm.models.checkpoint import load_model, render_chat

PROMPTS = ["Name a fruit.", "What is the capital of France?", "Write two sentences about the sea."]

loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
model, tokenizer = loaded.model, loaded.tokenizer

prompts = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
width = max(map(len, prompts))
input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

shapes: list[tuple[int, ...]] = []


def watch(module, args, inputs) -> None:
    """Keep the shape, and show that a forward pass begins."""
    shapes.append(tuple(inputs["input_ids"].shape))
    print(".", end="", file=sys.stderr, flush=True)


model.register_forward_pre_hook(watch, with_kwargs=True)
with torch.inference_mode():
    output = model.generate(
        input_ids, attention_mask=attention_mask, max_new_tokens=100, do_sample=False
    )

print(file=sys.stderr)
lengths = []
for row in output[:, width:].tolist():
    eos = model.generation_config.eos_token_id
    lengths.append(row.index(eos) + 1 if eos in row else len(row))

print(f"prompts of {[len(prompt) for prompt in prompts]} tokens, outputs of {lengths}\n")
print("forward  input_ids  rows that still need tokens")
for number, shape in enumerate(shapes):
    num_alive = sum(length > number for length in lengths)
    if number < 2 or number == len(shapes) - 1 or number in lengths:
        print(f"{number:7}  {list(shape)!s:9}  {num_alive} of {len(prompts)}")

computed = sum(rows * columns for rows, columns in shapes)
# The last token of an output is never computed: it was sampled, and nothing comes after it.
useful = sum(map(len, prompts)) + sum(lengths) - len(lengths)
print(f"\n{computed} positions computed, {useful} of them useful ({useful / computed:.0%})")
