"""One transformer layer with a KV cache, and a whole model, which is a stack of such layers.

The architecture is Llama's, for one request. Weights are those of a checkpoint, under Hugging
Face's names. Run alone, this file compares itself with Hugging Face's modules on SmolLM2-135M.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
"""A layer's weights `[output, input]` by their names in it."""
Cache = tuple[Tensor, Tensor]
"""A layer's keys and values of all tokens so far, each `[num_kv_heads, num_tokens, head_dim]`."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `[num_tokens, hidden_size]` to a mean square of 1, then multiply by
    `weight`."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, start: int, theta: float) -> Tensor:
    """Apply RoPE: rotate each pair of numbers in `[num_heads, num_tokens, head_dim]` by its
    position."""
    half = x.shape[-1] // 2
    positions = torch.arange(start, start + x.shape[1])
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention of the last `num_new` tokens over all tokens: `[num_q_heads, num_new,
    head_dim]`, like `query`. Keys and values are `[num_kv_heads, num_tokens, head_dim]`."""
    (_, num_new, head_dim), num_tokens = query.shape, key.shape[1]
    group = len(query) // len(key)  # query heads that share a KV head
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) / head_dim**0.5
    is_later = torch.ones(num_new, num_tokens, dtype=torch.bool).triu(num_tokens - num_new + 1)
    weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)  # the causal mask
    return weights @ value.repeat_interleave(group, 0)


def mlp(x: Tensor, w: Weights) -> Tensor:
    """Compute each token `[num_new, hidden_size]` by itself (SwiGLU)."""
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    return (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def attention(x: Tensor, w: Weights, cache: Cache | None, config) -> tuple[Tensor, Cache]:
    """Let new tokens `[num_new, hidden_size]` look at all tokens so far. Also returns the cache
    with their KV."""

    def heads(name: str) -> Tensor:
        return (x @ w[name].T).view(len(x), -1, config.head_dim).transpose(0, 1)

    start = 0 if cache is None else cache[0].shape[1]
    theta = config.rope_parameters["rope_theta"]
    query = rotate(heads("self_attn.q_proj.weight"), start, theta)
    key = rotate(heads("self_attn.k_proj.weight"), start, theta)
    value = heads("self_attn.v_proj.weight")
    if cache is not None:
        key, value = torch.cat([cache[0], key], 1), torch.cat([cache[1], value], 1)
    attended = attend(query, key, value)
    return attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T, (key, value)


def layer(x: Tensor, w: Weights, cache: Cache | None, config) -> tuple[Tensor, Cache]:
    """Compute new tokens `[num_new, hidden_size]` in one layer."""
    normed = rms_norm(x, w["input_layernorm.weight"], config.rms_norm_eps)
    part, cache = attention(normed, w, cache, config)
    x = x + part
    return x + mlp(rms_norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps), w), cache


def sample(logits: Tensor, temperature: float, top_p: float, uniform: float) -> int:
    """Choose the next token.

    Args:
        logits: `[vocab_size]`.
        temperature: divides the logits; 0 for the likeliest token.
        top_p: only the likeliest tokens count, as few as together have this probability.
        uniform: a random number, at least 0 and less than 1.
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities, token_ids = (logits / temperature).softmax(-1).sort(descending=True)
    sums = probabilities.cumsum(-1)
    num_kept = int((sums - probabilities < top_p).sum())  # with the token that reaches top_p
    return int(token_ids[(sums[: num_kept - 1] <= uniform * sums[num_kept - 1]).sum()])


class Model:
    """Embedding, layers, last norm, LM head; `checkpoint` is a Hugging Face Llama model.

    `layer` computes a layer; several processes have another (`m5_cut_model`)."""

    def __init__(self, checkpoint, layer=layer) -> None:
        self.config, self.weights, self.layer = checkpoint.config, checkpoint.state_dict(), layer
        self.layers: list[Weights] = [{} for _ in range(self.config.num_hidden_layers)]
        for name, weight in self.weights.items():
            if name.startswith("model.layers."):
                _, _, index, rest = name.split(".", 3)
                self.layers[int(index)][rest] = weight

    def forward(self, token_ids: list[int], caches: list[Cache] | None):
        """Return logits `[vocab_size]` for the token after the last one, and the caches of all
        layers."""
        x = self.weights["model.embed_tokens.weight"][token_ids]
        new_caches = []
        for index, weights in enumerate(self.layers):
            x, cache = self.layer(x, weights, caches[index] if caches else None, self.config)
            new_caches.append(cache)
        last = rms_norm(x[-1:], self.weights["model.norm.weight"], self.config.rms_norm_eps)
        return (last @ self.weights["lm_head.weight"].T)[0], new_caches


def watch_layers(
    model: Model, token_ids: list[int], caches: list[Cache] | None
) -> list[dict[str, Tensor]]:
    """Return for each layer the tensors that its functions have when they return, by their
    names."""
    seen: list[dict[str, Tensor]] = [{}]
    codes = [each.__code__ for each in (attention, attend, mlp, layer)]

    def watch(frame, event: str, argument) -> None:
        if event == "return" and frame.f_code in codes:
            seen[-1] |= {k: v for k, v in frame.f_locals.items() if isinstance(v, Tensor)}
            if frame.f_code is layer.__code__:
                seen.append({})

    sys.setprofile(watch)
    model.forward(token_ids, caches)
    sys.setprofile(None)
    return seen[:-1]


def main() -> None:
    """Compare logits with Hugging Face's; then print the shapes of a prefill and of a decode
    step."""
    from milestone_llm.models.checkpoint import load_model

    loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
    model, token_ids = Model(loaded.model), loaded.tokenizer.encode("The capital of France is")
    whole, _ = model.forward(token_ids, None)
    _, caches = model.forward(token_ids[:-1], None)
    one_more, _ = model.forward(token_ids[-1:], caches)
    theirs = loaded.model(torch.tensor([token_ids])).logits[0, -1]
    print("logits as Hugging Face computes them:  ", bool(torch.allclose(whole, theirs, atol=1e-3)))
    print(
        "all at once, and the last with a cache:", bool(torch.allclose(whole, one_more, atol=1e-3))
    )
    prefill, *_ = watch_layers(model, token_ids[:-1], None)
    decode, *_ = watch_layers(model, token_ids[-1:], caches)
    print("\nin a layer        4 tokens, no cache    1 token, 4 in the cache")
    for name in ("x", "query", "key", "value", "scores", "is_later", "attended", "gate"):
        print(f"{name:18}{list(prefill[name].shape)!s:22}{list(decode[name].shape)}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
