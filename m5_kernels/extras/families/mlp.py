"""The MLP of families with another activation than SiLU, or without a gate.

with a gate   down(activation(gate) * up), gate and up merged in one linear layer
without       down(activation(up))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.linear import LinearMethod, LinearWeight, Weight
from m5_kernels.decoder.weights import StoredWeight, zeros_if
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.triton_or_twin import ceil_div, next_power_of_2, tl, triton

SILU, GELU, RELU, RELU2, XIELU = range(5)
ACTIVATIONS = {
    "silu": SILU,
    "gelu_pytorch_tanh": GELU,
    "gelu_new": GELU,
    "relu": RELU,
    "relu2": RELU2,
    "xielu": XIELU,
}
XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6
XIELU_CONSTANTS = {"beta": XIELU_BETA, "eps": XIELU_EPSILON}
"""By the names that checkpoints have for them."""


@dataclass(frozen=True)
class FamilyMLP:
    """Takes the place of `DenseMLP`."""

    activation: int
    is_gated: bool
    up: Weight
    """Gate and up, if there is a gate."""
    up_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None
    is_merged: bool = False
    """Whether a checkpoint merges gate and up as well."""
    alphas: torch.Tensor | None = None
    """xIELU's two parameters, fp32: how steep it is above zero, and below."""

    @classmethod
    def create(
        cls,
        index: int,
        config: DecoderConfig,
        linear: LinearMethod,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> FamilyMLP:
        """Return the MLP of a layer, not yet filled. Biases that may stay unfilled are zeros."""
        hidden, neurons = config.hidden_size, config.intermediate_size
        up_size = 2 * neurons if config.family.is_gated else neurons
        activation = ACTIVATIONS[config.activation]
        return cls(
            activation=activation,
            is_gated=config.family.is_gated,
            up=linear.create(up_size, hidden, dtype, device),
            up_bias=zeros_if(config.has_mlp_bias, up_size, dtype, device),
            down=linear.create(hidden, neurons, dtype, device),
            down_bias=zeros_if(config.has_mlp_bias, hidden, dtype, device),
            is_merged="gate_up" in config.family.merged,
            alphas=zeros_if(activation == XIELU, 2, torch.float32, device),
        )

    def __call__(self, hidden: torch.Tensor, linear: LinearMethod, launch: Launch) -> torch.Tensor:
        """Return what a layer adds to the residual stream, `[num_tokens, hidden_size]`."""
        if self.activation == SILU and self.is_gated:
            neurons = linear.gate_up(hidden, self.up, self.up_bias, launch)
        else:
            neurons = linear.apply(hidden, self.up, self.up_bias, launch)
            neurons = activate(neurons, self.activation, self.is_gated, self.alphas, launch)
        return linear.apply(neurons, self.down, self.down_bias, launch)

    def stored(self, prefix: str, whole: DecoderConfig) -> list[StoredWeight]:
        """Return where the weights of a checkpoint go. prefix: how their names begin."""
        hidden, neurons = whole.hidden_size, whole.intermediate_size
        names = ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)
        sizes = dict.fromkeys(names, neurons)
        if self.is_merged:
            sizes = {"gate_up_proj": 2 * neurons}
        alphas = tuple(f"{prefix}.act_fn.{name}" for name in ("alpha_p", "alpha_n"))
        return [
            StoredWeight(
                self.up,
                tuple((f"{prefix}.{name}.weight", size, hidden) for name, size in sizes.items()),
            ),
            StoredWeight(
                self.up_bias,
                tuple((f"{prefix}.{name}.bias", size) for name, size in sizes.items()),
            ),
            StoredWeight(self.down, ((f"{prefix}.down_proj.weight", hidden, neurons),)),
            StoredWeight(self.down_bias, ((f"{prefix}.down_proj.bias", hidden),)),
            StoredWeight(
                self.alphas,
                tuple((name, 1) for name in alphas),
                {alphas[0]: F.softplus, alphas[1]: lambda alpha: XIELU_BETA + F.softplus(alpha)},
            ),
        ]

    def token_counts(self) -> Iterable[int]:
        """Return none: `LinearMethod` knows those of linear layers."""
        return ()

    @property
    def weights(self) -> list[LinearWeight]:
        """The weights of the linear layers, the largest first."""
        is_fused = self.activation == SILU and self.is_gated
        return [LinearWeight(self.up, is_fused), LinearWeight(self.down, is_gated=False)]


def activate(
    neurons: torch.Tensor,
    activation: int,
    is_gated: bool,
    alphas: torch.Tensor | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `activation(gate) * up`, or `activation(neurons)` without a gate.

    neurons: `[num_tokens, size]`, or, if gated, `[num_tokens, 2 * size]`, rows contiguous.
    Returns `[num_tokens, size]`, contiguous, rounded where Hugging Face rounds.
    """
    if not launch.runs_triton(neurons):
        return activate_torch(neurons, activation, is_gated, alphas)
    num_tokens, size = neurons.shape[0], neurons.shape[1] // (2 if is_gated else 1)
    output = neurons.new_empty(num_tokens, size)
    block = min(1024, next_power_of_2(size))
    if num_tokens:
        launch.kernel(_activation_kernel, (num_tokens, ceil_div(size, block)))(
            neurons, output, alphas, neurons.stride(0), size,
            ACTIVATION=activation, IS_GATED=is_gated, BLOCK=block, num_warps=4,
            **launch.pdl_options(),
        )  # fmt: skip
    return output


@triton.jit
def _activation_kernel(
    neurons, output, alphas, stride, size,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    row = neurons + token * stride + columns
    rounded = tl.load(row, mask=mask, other=0.0)
    x = rounded.to(tl.float32)
    if ACTIVATION == 0:
        result = x * tl.sigmoid(x)
    elif ACTIVATION == 1:  # tanh(y) = 2 * sigmoid(2 * y) - 1
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == 2:
        result = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif ACTIVATION == 3:
        result = tl.where(x < 0, 0.0, x * x)
    else:
        above, below = tl.load(alphas), tl.load(alphas + 1)
        low = tl.minimum(x, -1e-6)
        # exp(x) - 1 loses its digits near zero
        expm1 = tl.where(low > -0.03, low * (1 + low * (0.5 + low / 6)), tl.exp(low) - 1)
        result = tl.where(x > 0, above * x * x, (expm1 - x) * below) + 0.5 * x
    result = result.to(rounded.dtype)
    if IS_GATED:
        up = tl.load(row + size, mask=mask, other=0.0)
        result = (result.to(tl.float32) * up.to(tl.float32)).to(rounded.dtype)
    tl.store(output + token * size + columns, result, mask=mask)


def activate_torch(
    neurons: torch.Tensor, activation: int, is_gated: bool, alphas: torch.Tensor | None = None
) -> torch.Tensor:
    """Specify `activate`."""
    x, up = neurons.chunk(2, dim=-1) if is_gated else (neurons, None)
    if activation == SILU:
        result = F.silu(x)
    elif activation == GELU:
        result = F.gelu(x, approximate="tanh")
    elif activation in (RELU, RELU2):
        result = F.relu(x) if activation == RELU else F.relu(x).square()
    else:
        assert alphas is not None
        v, (above, below) = x.float(), alphas
        low = (torch.expm1(v.clamp(max=XIELU_EPSILON)) - v) * below
        result = (torch.where(v > 0, above * v * v, low) + XIELU_BETA * v).to(x.dtype)
    return result if up is None else result * up
