"""A layer's MLP of many experts, of which a token meets a few (vLLM: `MoERunner`).

one token    route_one -> gate and up -> down                        3 launches
more         router -> route -> sort -> gate and up -> down          5 launches
the sum      in the add and norm that follow, see `combine_norm`; with norms of another family
             than llama's a launch of its own, `combine`
on a CPU     torch, see `cpu_experts`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.linear import LinearMethod, LinearWeight, Weight
from m5_kernels.decoder.mlp import MLP, DenseMLP
from m5_kernels.decoder.weights import StoredWeight
from m5_kernels.kernels.launch import Launch

from .combine_norm import Pairs
from .config import ExpertsConfig
from .expert_load import RoutedExperts
from .grouped import combine, experts_torch, grouped_down, grouped_gate_up
from .routing import route, route_one
from .sorting import SortedPairs, sort_by_expert
from .tiles import H200_GROUPED, grouped_tiles


@dataclass(frozen=True)
class CreateMLP:
    """Creates the MLP of each layer: experts, or a dense one in the layers that have none."""

    experts: ExpertsConfig
    compute: Callable[..., torch.Tensor] = experts_torch
    """Computes the experts where no kernels run."""
    routed: RoutedExperts | None = None
    """Keeps the experts of a step's tokens; None: they are not kept."""
    returns_pairs: bool = False
    """Whether what follows sums a token's experts (`combine_norm`)."""

    def __call__(
        self,
        index: int,
        config: DecoderConfig,
        linear: LinearMethod,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> MLP:
        """Return the MLP of a layer, not yet filled."""
        if index not in self.experts.sparse_layers:
            return DenseMLP.create(index, config, linear, dtype, device)
        created = MoEMLP.create(index, self.experts, config, linear, dtype, device)
        topk_ids = None if self.routed is None else self.routed.topk_ids[index]
        return replace(
            created, compute=self.compute, topk_ids=topk_ids, returns_pairs=self.returns_pairs
        )


@dataclass(frozen=True)
class MoEMLP:
    """Weights of the experts of a layer, of their router, and of the expert that all share."""

    config: ExpertsConfig
    router: Weight
    """`[num_experts, hidden_size]`."""
    router_bias: torch.Tensor | None
    bias: torch.Tensor | None
    """fp32, added to scores for the choice."""
    gate_up: torch.Tensor
    """`[num_experts, 2 * size, hidden_size]`, the gates of an expert first."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """`[num_experts, hidden_size, size]`."""
    down_bias: torch.Tensor | None
    shared: DenseMLP | None
    shared_gate: Weight | None
    """`[1, hidden_size]`."""
    arrivals: torch.Tensor
    """int32 `[1]`, as `route_one` takes it."""
    compute: Callable[..., torch.Tensor] = experts_torch
    topk_ids: torch.Tensor | None = None
    """int32 `[max_tokens, top_k]`, filled with the experts of a step's tokens (`expert_load`)."""
    returns_pairs: bool = False

    @classmethod
    def create(
        cls,
        index: int,
        experts: ExpertsConfig,
        config: DecoderConfig,
        linear: LinearMethod,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> MoEMLP:
        """Return experts of this shape, not yet filled."""
        hidden_size, num_experts = config.hidden_size, experts.routing.num_experts
        router_dtype = torch.float32 if experts.routes_in_fp32 else dtype
        own = replace(config, intermediate_size=experts.shared_size)

        def bias(*sizes: int) -> torch.Tensor | None:
            return torch.empty(sizes, dtype=dtype, device=device) if experts.has_biases else None

        return cls(
            config=experts,
            router=linear.create(num_experts, hidden_size, router_dtype, device),
            router_bias=bias(num_experts),
            bias=torch.zeros(experts.bias_shape, device=device) if experts.bias else None,
            gate_up=torch.empty(
                num_experts, 2 * experts.size, hidden_size, dtype=dtype, device=device
            ),
            gate_up_bias=bias(num_experts, 2 * experts.size),
            down=torch.empty(num_experts, hidden_size, experts.size, dtype=dtype, device=device),
            down_bias=bias(num_experts, hidden_size),
            shared=(
                DenseMLP.create(index, own, linear, dtype, device) if experts.shared_size else None
            ),
            shared_gate=(
                linear.create(1, hidden_size, dtype, device) if experts.shared_gate else None
            ),
            arrivals=torch.zeros(1, dtype=torch.int32, device=device),
        )

    def __call__(self, hidden: torch.Tensor, linear: LinearMethod, launch: Launch) -> Any:
        """Return what the layer adds to the residual stream, `[num_tokens, hidden_size]`, or
        `Pairs` of it."""
        routing, swiglu, bias = self.config.routing, self.config.swiglu, self.bias
        shared = self._shared(hidden, linear, launch)
        topk_ids = self._room_for_ids(hidden)
        if not launch.runs_triton(hidden):
            logits = self._router_logits(hidden, linear, launch)
            chosen = route(logits, routing, bias, topk_ids, launch)
            return self.compute(
                hidden, self.gate_up, self.down, *chosen, shared,
                self.gate_up_bias, self.down_bias, swiglu,
            )  # fmt: skip
        num_pairs = len(hidden) * routing.top_k
        tiles = grouped_tiles(num_pairs, routing.num_experts, hidden.dtype, hidden.device)
        rows = tiles.gate_up.rows
        if len(hidden) == 1:
            topk_ids, first_rows, topk_weights = route_one(
                hidden, self.router, routing, bias, self.arrivals, rows, topk_ids[0], launch,
                self.router_bias,
            )  # fmt: skip
            pairs = SortedPairs(first_rows, topk_ids)
        else:
            logits = self._router_logits(hidden, linear, launch)
            _, topk_weights = route(logits, routing, bias, topk_ids, launch)
            pairs = sort_by_expert(topk_ids, routing.num_experts, rows, launch)
        neurons = grouped_gate_up(
            hidden, self.gate_up, pairs, routing.top_k, tiles.gate_up, launch,
            self.gate_up_bias, swiglu,
        )  # fmt: skip
        outputs = grouped_down(
            neurons, self.down, pairs, topk_weights, tiles.down, launch, self.down_bias
        )
        if self.returns_pairs:
            return Pairs(outputs, routing.top_k, shared)
        return combine(outputs, routing.top_k, shared, launch)

    def _room_for_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return where the experts of these tokens go, int32 `[num_tokens, top_k]`."""
        num_tokens = len(hidden)
        if self.topk_ids is None or num_tokens > len(self.topk_ids):  # larger than any step
            return hidden.new_empty(num_tokens, self.config.routing.top_k, dtype=torch.int32)
        return self.topk_ids[:num_tokens]

    def _router_logits(
        self, hidden: torch.Tensor, linear: LinearMethod, launch: Launch
    ) -> torch.Tensor:
        if self.config.routes_in_fp32:
            return F.linear(hidden.float(), self.router)
        return linear.apply(hidden, self.router, self.router_bias, launch)

    def _shared(
        self, hidden: torch.Tensor, linear: LinearMethod, launch: Launch
    ) -> torch.Tensor | None:
        if self.shared is None:
            return None
        output = self.shared(hidden, linear, launch)
        if self.shared_gate is None:
            return output
        return output * linear.apply(hidden, self.shared_gate, None, launch).sigmoid()

    def stored(self, prefix: str, whole: DecoderConfig) -> list[StoredWeight]:
        """Return where the weights of a checkpoint go. prefix: how their names begin."""
        c, hidden_size = self.config, whole.hidden_size
        prefix = prefix.removesuffix("mlp") + c.block
        num_experts, two, _ = self.gate_up.shape
        gate_up, down = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
        sizes, down_sizes, converts = (two, hidden_size), (hidden_size, c.size), {}
        if c.is_interleaved:
            sizes, down_sizes = sizes[::-1], down_sizes[::-1]
            converts = {
                gate_up: lambda weight: gates_first(weight).mT,
                f"{gate_up}_bias": gates_first,
                down: lambda weight: weight.mT,
            }
        stored = [
            StoredWeight(self.router, ((f"{prefix}.{c.router}.weight", num_experts, hidden_size),)),
            StoredWeight(self.router_bias, ((f"{prefix}.{c.router}.bias", num_experts),)),
            StoredWeight(self.bias, ((f"{prefix}.{c.bias}", *c.bias_shape),)),
            StoredWeight(self.gate_up, ((gate_up, num_experts, *sizes),), converts),
            StoredWeight(self.gate_up_bias, ((f"{gate_up}_bias", num_experts, two),), converts),
            StoredWeight(self.down, ((down, num_experts, *down_sizes),), converts),
            StoredWeight(self.down_bias, ((f"{down}_bias", num_experts, hidden_size),)),
            StoredWeight(self.shared_gate, ((f"{prefix}.{c.shared_gate}.weight", 1, hidden_size),)),
        ]
        if self.shared is not None:
            own = replace(whole, intermediate_size=c.shared_size)
            stored += self.shared.stored(f"{prefix}.{c.shared}", own)
        return stored

    @property
    def weights(self) -> list[LinearWeight]:
        """Return none: what takes the time of this MLP are kernels of its own."""
        return []

    def token_counts(self) -> Iterable[int]:
        """Return from which numbers of tokens on products have other tiles."""
        routing = self.config.routing
        return [most * routing.num_experts // routing.top_k + 1 for most, _ in H200_GROUPED]


def gates_first(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight `[..., 2 * size]` whose gates and ups take turns, with the gates first."""
    return torch.cat((weight[..., ::2], weight[..., 1::2]), -1)
