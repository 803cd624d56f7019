"""From "Hello" to an answer: chat template, token ids, logits, greedy choice, until EOS."""

import torch

from docs.questions.m0_transformer import Model
from milestone_llm.models.checkpoint import load_model, render_chat

torch.set_grad_enabled(False)
loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
model, tokenizer = Model(loaded.model), loaded.tokenizer
eos = loaded.model.generation_config.eos_token_id

prompt = render_chat(tokenizer, [{"role": "user", "content": "Hello"}])
print(f"prompt, {len(prompt)} tokens:")
print(tokenizer.decode(prompt))

logits, caches = model.forward(prompt, None)
print(f"{len(logits):,} logits; the five largest:")
for probability, token_id in zip(*logits.softmax(-1).topk(5), strict=True):
    text = tokenizer.decode([int(token_id)])
    print(f"  {text!r:12} logit {float(logits[token_id]):6.2f}  probability {probability:6.1%}")

output = [int(logits.argmax())]
while output[-1] != eos and len(output) < 40:
    logits, caches = model.forward(output[-1:], caches)  # one token in, one token out
    output.append(int(logits.argmax()))
print("\noutput:", repr(tokenizer.decode(output)))
print(f"{len(output)} tokens; the last one is {output[-1]}, EOS is {eos}")
