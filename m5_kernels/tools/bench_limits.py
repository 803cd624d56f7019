"""The time of a run if reading memory and multiplying matrices were all there is to do.

A decode step reads every weight once, for any batch size, and the KV of every row. Of experts it
reads those that its rows meet, which are counted as if each row chose at random. Compared with
reading, computing takes almost no time. With a prompt it is the other way round. Both times are
lower bounds: writes, norms, sampling and the gaps between kernels are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.models.kv_shape import KVShape

from .measure import Ceilings


class Bits(NamedTuple):
    """Bits of a number that a run reads. 0: as many as the model's dtype has."""

    weights: int = 0
    lm_head: int = 0
    kv: int = 0

    @classmethod
    def of(cls, config: Any) -> Bits:
        """Return those of an engine with this configuration."""
        quantization = getattr(config, "quantization", None)
        weights = 8 if quantization else 0
        kv = 8 if getattr(config, "kv_cache_dtype", None) == "fp8" else 0
        return cls(weights, 0 if quantization == "fp8" else weights, kv)


def seconds_at_best(
    model: Any,
    items: Sequence[WorkItem],
    num_steps: float,
    ceilings: Ceilings,
    bits: Bits | None = None,
) -> dict[str, float]:
    """Return the least seconds to serve `items` in `num_steps` steps.

    They are the time for reading weights (once a step), for reading keys and values (for each
    output token after its first), and for computing prompts.
    """
    config, kv = model.config.get_text_config(), KVShape.of(model)
    with torch.device("meta"):  # only shapes: M5's decoder may have taken the weights over
        shapes = dict(type(model)(model.config).named_parameters())  # a tied weight is there once
    num_weights = sum(p.numel() for p in shapes.values())
    of_experts = [p for name, p in shapes.items() if ".experts." in name]
    num_of_experts = sum(p.numel() for p in of_experts)  # `[num_experts, out_size, in_size]`
    share = config.num_experts_per_tok / len(of_experts[0]) if of_experts else 0.0
    num_rows = sum(item.params.max_tokens for item in items) / num_steps
    num_read = num_weights - num_of_experts * (1 - share) ** num_rows
    num_computed = num_weights - num_of_experts * (1 - share)
    embedding = config.vocab_size * config.hidden_size
    if not config.tie_word_embeddings:  # a few rows are looked up, and it is not read as a whole
        num_read -= embedding
        num_computed -= embedding
    prompts = [len(item.prompt) for item in items]
    # Each output token reads all tokens before it, except the first, which the prompt's row gives.
    later = [item.params.max_tokens - 1 for item in items]
    contexts = sum(m * n + m * (m + 1) // 2 for n, m in zip(prompts, later, strict=True))
    heads = config.num_attention_heads * kv.head_dim
    scores = sum(2 * n * n for n in prompts) * heads * config.num_hidden_layers  # causal: half
    # The LM head is computed for a prompt's last token only, so it is left out here.
    products = 2 * (num_computed - embedding) * sum(prompts)
    of_weight, of_head, of_kv = (bit / 8 or model.dtype.itemsize for bit in bits or Bits())
    weight_bytes = ((num_read - embedding) * of_weight + embedding * of_head) * num_steps
    kv_bytes = contexts * kv.bytes_per_token * of_kv / model.dtype.itemsize
    return {
        "weights": weight_bytes / ceilings.read_gbps / 1e9,
        "kv": kv_bytes / ceilings.read_gbps / 1e9,
        "prefill": (products + scores) / ceilings.matmul_tflops / 1e12,
    }


def limit_text(best: dict[str, float], ceilings: Ceilings, seconds: float, num_tokens: int) -> str:
    """Say how close a run of so many seconds and output tokens came to the limit."""
    total, reading = sum(best.values()), best["weights"] + best["kv"]
    return (
        f"At best, with reads at {ceilings.read_gbps:,.0f} GB/s and products at "
        f"{ceilings.matmul_tflops:,.0f} TFLOP/s: {best['kv']:.2f} s for KV, {best['weights']:.2f} "
        f"s for weights, {best['prefill']:.2f} s for prompts, {num_tokens / total:,.0f} tok/s.\n"
        f"This run reached {total / seconds:.0%} of that; for {reading / seconds:.0%} of its time "
        "memory was surely being read."
    )
