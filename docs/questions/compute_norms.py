"""LayerNorm and RMSNorm, each with the residual addition: values and memory traffic."""

import torch
import torch.nn.functional as F

from m5_kernels.kernels.rms_norm import add_rms_norm
from m5_kernels.kernels.rms_norm import rms_norm_torch as rms_norm

x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
print("x                 ", x[0].tolist(), " mean 3, mean square 12.5")
layer_norm = F.layer_norm(x, (4,))[0]
print("LayerNorm         ", [round(v, 3) for v in layer_norm.tolist()], "mean 0, variance 1")
rms = rms_norm(x, torch.ones(4), 1e-6)[0]
print("RMSNorm           ", [round(v, 3) for v in rms.tolist()], "mean square 1")
print(
    "RMSNorm of 10 x   ", [round(v, 3) for v in rms_norm(10 * x, torch.ones(4), 1e-6)[0].tolist()]
)

rows, hidden_size = 256, 1024
hidden, residual = torch.randn(2, rows, hidden_size).unbind()
weight = torch.ones(hidden_size)
total = residual + hidden
apart = rms_norm(total, weight, 1e-6)
fused = add_rms_norm(hidden, residual, weight, 1e-6)  # residual now holds the sum
print("\nfused gives the same:", torch.equal(fused, apart) and torch.equal(residual, total))
one = rows * hidden_size * 2  # bytes of a tensor in bfloat16
print(f"\n{rows} rows of {hidden_size} in bfloat16      reads    writes     bytes")
print(f"addition, then norm              2 + 1     1 + 1   {5 * one:,}")
print(f"addition and norm in one kernel      2         2   {4 * one:,}")
