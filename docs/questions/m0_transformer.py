"""One transformer layer with a KV cache, and a whole model, which is a stack of such layers.

The architecture is Llama's, for one request. Weights are those of a checkpoint, under Hugging
Face's names. Run alone, this file compares itself with Hugging Face's modules on SmolLM2-135M.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from milestone_llm.models.checkpoint import load_model

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


def layer(x: Tensor, w: dict[str, Tensor], cache: Cache | None, config) -> tuple[Tensor, Cache]:
    """Compute new tokens `[num_new, hidden_size]` in one layer. Also returns the cache with their
    KV."""
    num_new, head_dim = len(x), config.head_dim
    start = 0 if cache is None else cache[0].shape[1]

    # Attention: each new token uses all tokens so far.
    normed = rms_norm(x, w["input_layernorm.weight"], config.rms_norm_eps)

    def heads(name: str) -> Tensor:
        return (normed @ w[name].T).view(num_new, -1, head_dim).transpose(0, 1)

    theta = config.rope_parameters["rope_theta"]
    query = rotate(heads("self_attn.q_proj.weight"), start, theta)
    key = rotate(heads("self_attn.k_proj.weight"), start, theta)
    value = heads("self_attn.v_proj.weight")
    if cache is not None:
        key, value = torch.cat([cache[0], key], 1), torch.cat([cache[1], value], 1)
    group = len(query) // len(key)  # query heads that share a KV head
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) / head_dim**0.5
    is_later = torch.ones(num_new, key.shape[1], dtype=torch.bool).triu(start + 1)
    weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)  # the causal mask
    attended = weights @ value.repeat_interleave(group, 0)
    x = x + attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T

    # The MLP: each token by itself.
    normed = rms_norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T, (key, value)


class Model:
    """Embedding, layers, last norm, LM head; `checkpoint` is a Hugging Face Llama model."""

    def __init__(self, checkpoint) -> None:
        self.config, self.weights = checkpoint.config, checkpoint.state_dict()
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(self.config.num_hidden_layers)]
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
            x, cache = layer(x, weights, caches[index] if caches else None, self.config)
            new_caches.append(cache)
        last = rms_norm(x[-1:], self.weights["model.norm.weight"], self.config.rms_norm_eps)
        return (last @ self.weights["lm_head.weight"].T)[0], new_caches


def watch_layers(
    model: Model, token_ids: list[int], caches: list[Cache] | None
) -> list[dict[str, Tensor]]:
    """Return for each layer the tensors that `layer` has when it returns, by their names."""
    seen = []

    def watch(frame, event: str, argument) -> None:
        if event == "return" and frame.f_code is layer.__code__:
            seen.append({k: v for k, v in frame.f_locals.items() if isinstance(v, Tensor)})

    sys.setprofile(watch)
    model.forward(token_ids, caches)
    sys.setprofile(None)
    return seen


def main() -> None:
    """Compare logits with Hugging Face's; then print the shapes of a prefill and of a decode
    step."""
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
