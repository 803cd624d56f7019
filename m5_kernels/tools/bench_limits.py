"""What a run would take if reading memory and multiplying matrices were all there is to it.

A decode step reads every weight once, whatever the batch, and the KV of every row; computing
hardly counts. A prompt is the other way round. Both counts are lower bounds: writes, norms,
sampling and everything between the kernels are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.models.kv_shape import KVShape

from .measure import Ceilings


@dataclass(frozen=True)
class RunLimit:
    """Bytes and operations of a workload, and the seconds that they take at best."""

    weight_bytes: float
    """Weights, read once a step."""
    kv_bytes: float
    """Keys and values, read once for each output token after its first."""
    prefill_flop: float

    @classmethod
    def of(cls, model: Any, items: Sequence[WorkItem], num_steps: float, bits: int = 0) -> RunLimit:
        """The limit of serving `items` in `num_steps` steps. bits: of a weight; 0: the model's."""
        tied_once = {p.data_ptr(): p.numel() for p in model.parameters()}
        num_weights = sum(tied_once.values())
        config, kv = model.config.get_text_config(), KVShape.of(model)
        embedding = config.vocab_size * config.hidden_size
        if not config.tie_word_embeddings:  # only looked up, not read
            num_weights -= embedding
        prompts = [len(item.prompt) for item in items]
        # Outputs but the first, which the prompt's row gives, read all tokens before them.
        later = [item.params.max_tokens - 1 for item in items]
        contexts = sum(m * n + m * (m + 1) // 2 for n, m in zip(prompts, later, strict=True))
        heads = config.num_attention_heads * kv.head_dim
        scores = sum(2 * n * n for n in prompts) * heads * config.num_hidden_layers  # causal: half
        # The head is computed for a prompt's last token only, so this counts it as the rest.
        products = 2 * (num_weights - embedding) * sum(prompts)
        return cls(
            weight_bytes=num_weights * (bits / 8 or model.dtype.itemsize) * num_steps,
            kv_bytes=contexts * kv.bytes_per_token,
            prefill_flop=products + scores,
        )

    def beside(self, ceilings: Ceilings, seconds: float, num_tokens: int) -> dict[str, Any]:
        """How near a run of `seconds` came to these ceilings, for JSON and for `limit_text`."""
        best = {
            "weights": self.weight_bytes / ceilings.read_gbps / 1e9,
            "kv": self.kv_bytes / ceilings.read_gbps / 1e9,
            "prefill": self.prefill_flop / ceilings.matmul_tflops / 1e12,
        }
        total = sum(best.values())
        return {
            "read_gbps": ceilings.read_gbps,
            "matmul_tflops": ceilings.matmul_tflops,
            "seconds_at_best": best,
            "tok_s_at_best": num_tokens / total,
            "share_of_limit": total / seconds,
            "share_of_bandwidth": (best["weights"] + best["kv"]) / seconds,
        }


def limit_text(data: dict[str, Any]) -> str:
    """`RunLimit.beside` in words."""
    best = data["seconds_at_best"]
    return (
        f"At best, with reads at {data['read_gbps']:,.0f} GB/s and products at "
        f"{data['matmul_tflops']:,.0f} TFLOP/s: {best['kv']:.2f} s for KV, {best['weights']:.2f} s "
        f"for weights, {best['prefill']:.2f} s for prompts, {data['tok_s_at_best']:,.0f} tok/s.\n"
        f"This run reached {data['share_of_limit']:.0%} of that; for "
        f"{data['share_of_bandwidth']:.0%} of its time memory was surely being read."
    )
