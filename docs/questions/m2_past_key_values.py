"""Continuous batching without regions: each request keeps a `past_key_values` of its own.

Hugging Face's modules take one cache for the whole batch. So before each step the caches are padded
and put side by side, and afterwards each row's new token is cut out again. How much is copied?
"""

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from m2_batching import LLMEngine, SamplingParams
from milestone_llm.models.tiny_models import build_tiny_model

NUM_STEPS = 12
model = build_tiny_model("llama")
prompts = [[7 + n] * (40 + 20 * n) for n in range(8)]
Cache = list[tuple[torch.Tensor, torch.Tensor]]


def prefill(prompt: list[int]) -> tuple[list[int], Cache]:
    """A prompt's first token, and its KV: keys and values of each layer."""
    output = model(torch.tensor([prompt]), past_key_values=DynamicCache())
    kv = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
    return [int(output.logits[0, -1].argmax())], kv


def side_by_side(caches: list[Cache]) -> tuple[DynamicCache, torch.Tensor]:
    """One cache for the batch, short ones padded on the left, and its mask."""
    lengths = torch.tensor([cache[0][0].shape[2] for cache in caches])
    width = int(lengths.max())

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, 0, width - tensor.shape[2], 0))

    batch = DynamicCache()
    for index, layer in enumerate(zip(*caches, strict=True)):
        keys, values = (torch.cat([padded(x) for x in side]) for side in zip(*layer, strict=True))
        batch.update(keys, values, index)
    mask = torch.arange(width + 1)[None, :] >= width - lengths[:, None]
    return batch, mask.long()


with torch.inference_mode():
    rows = [prefill(prompt) for prompt in prompts]
    joined = cut = 0
    for _ in range(NUM_STEPS - 1):
        batch, mask = side_by_side([cache for _, cache in rows])
        joined += sum(layer.keys.nbytes + layer.values.nbytes for layer in batch.layers)
        output = model(
            torch.tensor([[tokens[-1]] for tokens, _ in rows]),
            past_key_values=batch,
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
        )
        for place, (tokens, cache) in enumerate(rows):
            tokens.append(int(output.logits[place, -1].argmax()))
            for index, (keys, values) in enumerate(cache):
                new = batch.layers[index]
                own = slice(place, place + 1), slice(None), slice(-1, None)
                cache[index] = (
                    torch.cat((keys, new.keys[own]), 2),
                    torch.cat((values, new.values[own]), 2),
                )
        cut += sum(keys.nbytes + values.nbytes for _, cache in rows for keys, values in cache)

engine = LLMEngine(model, max_num_seqs=8, max_model_len=256)
params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
outputs = engine.generate(prompts, params)
same = sum(output.token_ids == tokens for output, (tokens, _) in zip(outputs, rows, strict=True))
kept = sum(2 * keys[:, :, 0].nbytes for _, cache in rows for keys, _ in cache)
steps = NUM_STEPS - 1
print("8 requests of 40 to 180 tokens                     KV written a step")
print(f"past_key_values each: padded and put together      {joined / steps / 1024:11,.0f} KiB")
print(f"                      a token added to each        {cut / steps / 1024:11,.0f} KiB")
print(f"a region each (M2):   a token stored in each       {kept / 1024:11,.0f} KiB")
print(f"same tokens: {same} of 8")
