"""What does `torch.compile` record of an addition with its norm, of RoPE, of SiLU times up?

The compiler given here only prints the operators. Without `backend`, each line becomes one kernel.
"""

import torch

from m5_kernels.kernels.rms_norm import add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import norm_and_rotate_torch
from m5_kernels.kernels.silu_mul import silu_mul_torch


def show(graph, inputs):
    """Print a graph, and compile nothing."""
    called = [node for node in graph.graph.nodes if node.op.startswith("call")]
    print("   ", " ".join(getattr(each.target, "__name__", each.target) for each in called))
    return graph.forward


rows, angles = torch.randn(2, 3, 64), torch.rand(8, 64)
heads, positions = rows[0].view(3, 1, 64), torch.tensor([0, 3, 7])
for function, inputs in (
    (add_rms_norm_torch, (rows[0], rows[1], torch.ones(64), 1e-6)),
    (norm_and_rotate_torch, (heads, positions, angles, None, 1e-6)),
    (silu_mul_torch, (rows[0],)),
):
    print(function.__name__)
    torch.compile(function, backend=show, fullgraph=True)(*inputs)
