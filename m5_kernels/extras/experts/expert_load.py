"""Expert load: how many experts the tokens of a step met, for a record of the step.

Routing writes the experts of each token where a CUDA graph can write, too: into memory that stays.
A step that is recorded launches a few more operations after it, which count on the device. Other
steps pay nothing (vLLM counts for its load balancer: `expert_load_view`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from m5_kernels.kernels.cuda_graph import current_stream
from m5_kernels.to_host import on_its_way
from milestone_llm.core.plan import StepPlan


class RoutedExperts:
    """The experts that the tokens of the last step met, in each layer that has experts.

    Args:
        layers: those that have experts.
        max_tokens: most tokens of a step.
    """

    def __init__(
        self,
        layers: Iterable[int],
        max_tokens: int,
        num_experts: int,
        top_k: int,
        device: torch.device | str,
    ) -> None:
        self.num_experts = num_experts
        self.stream = current_stream(device)
        """That of the engine, on which this object is created, too."""
        self.topk_ids = {
            layer: torch.zeros(max_tokens, top_k, dtype=torch.int32, device=device)
            for layer in sorted(layers)
        }
        """int32 `[max_tokens, top_k]` by layer."""

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Callable[[], dict[str, object]]:
        """Count the experts of the step that was just launched, also of rows that are wasted.

        Returns:
            A function that waits for the counts, and returns them as the field of a record.
        """
        num_tokens = sum(row.num_new_tokens for row in plan.rows)
        if not num_tokens:
            return dict
        with torch.cuda.stream(self.stream):
            layers = [each[:num_tokens] for each in self.topk_ids.values()]
            ids = torch.stack(layers).flatten(1).long()
            counts = ids.new_zeros(len(ids), self.num_experts)
            counts.scatter_add_(1, ids, torch.ones_like(ids))
            num_met = (counts > 0).sum(1).double().mean()
            read = on_its_way(torch.stack([num_met, counts.max() / ids.shape[1]]))

        def load() -> dict[str, object]:
            met, share = read().tolist()
            return {
                "expert_load": {
                    "num_experts": self.num_experts,
                    "num_met": round(met, 2),
                    "largest_share": round(share, 4),
                }
            }

        return load
