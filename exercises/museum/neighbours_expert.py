"""A model with experts answers one user well, and two at a time not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .exhibit import Arrival, Exhibit, greedy
from .invariants import equal_prompts_agree


def cpu_experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    *of_gpt_oss: object,
) -> torch.Tensor:
    """Sort pairs by expert, multiply each expert's rows, and put the results back in order."""
    num_tokens, top_k = topk_ids.shape
    ids = topk_ids.flatten()
    order = ids.argsort(stable=True)
    results = []
    for pair in order.tolist():
        gate, up = F.linear(hidden[pair // top_k], gate_up[ids[pair]]).chunk(2)
        results.append(F.linear(F.silu(gate) * up, down[ids[pair]]))
    in_order = torch.stack(results)[order]
    return (in_order.view(num_tokens, top_k, -1) * topk_weights[..., None]).sum(1).to(hidden)


EXHIBIT = Exhibit(
    milestone="m5_kernels",
    family="qwen3-moe",
    place="m5_kernels.extras.experts.cpu_experts.cpu_experts",
    broken=cpu_experts,
    traffic=[
        Arrival(0, "a", [17], greedy(4)),
        Arrival(4, "b", [17], greedy(4)),
        Arrival(4, "c", [57], greedy(4)),
        Arrival(4, "d", [99], greedy(4)),
    ],
    invariant=equal_prompts_agree,
    config={"enable_prefix_caching": False},
    both={"m5_kernels.decoder.load.check_logits": lambda *given: None},
    setting="A decoder's logits are not compared with the model's here: this one would not pass.",
    text="""
question: a and b have the same prompt, of one token. Each token meets two of eight experts. How
  many pairs of a token and an expert are in the step of a, and how many in that of b?
cause: Results in the order of the experts go back to the order of the tokens by `order`, which is
  the way there. The way back is its inverse. With two pairs both are the same. With more, most
  tokens get what a neighbour's expert made, in the right shape and of the right size.
invariant: What a request gets does not depend on who shares its step.
fix: `output[order] = results`, or sort `order` once more. The engine's kernels write each pair
  to its own place, and nothing is put back.
test: tests/m5/extras/experts/test_experts.py::test_torchs_grouped_product_is_its_twin
seen: A layer of experts permuted its rows and took a wrong way back; the mend was to permute
  and to undo exactly that.
threads: pytorch/torchtitan#1340 (merged)
""",
    walk="""
call exercises/museum/neighbours_expert.py::cpu_experts, when len(hidden) == 3
Three requests are in the step, and their rows have six pairs.
p topk_ids.tolist()  # who meets which experts
Try `n` until `order` is there. On the way back, `order[order]` would have to count up.
""",
)
