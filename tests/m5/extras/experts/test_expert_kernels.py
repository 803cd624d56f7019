"""Kernels of experts against their twins: odd sizes, ties, NaN, experts that none or all meet."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.linear import LinearMethod
from m5_kernels.extras.experts.combine_norm import Pairs, add_norm_of_pairs
from m5_kernels.extras.experts.config import experts_config
from m5_kernels.extras.experts.grouped import (
    combine,
    experts_torch,
    grouped_down,
    grouped_gate_up,
)
from m5_kernels.extras.experts.moe_mlp import MoEMLP
from m5_kernels.extras.experts.routing import (
    SIGMOID,
    SOFTMAX_OF_CHOSEN,
    Routing,
    route,
    route_one,
    route_torch,
)
from m5_kernels.extras.experts.sorting import sort_by_expert, sort_by_expert_torch
from m5_kernels.extras.experts.swiglu import ClampedSwiGLU
from m5_kernels.extras.experts.tiles import GroupedTile, grouped_tiles
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.rms_norm import add_rms_norm
from m5_kernels.tools.measure import relative_error
from milestone_llm.lab.families import build_small_model

pytestmark = pytest.mark.usefixtures("poisoned")
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
"""Triton's interpreter does not multiply matrices in bf16."""

ROUTINGS = [
    Routing(8, 2),
    Routing(128, 8, is_renormalised=False),
    Routing(60, 4),
    Routing(13, 5, SOFTMAX_OF_CHOSEN, is_renormalised=False),
    Routing(16, 4, SIGMOID, least_sum=1e-20, scale=2.5, num_groups=4, top_groups=2),
    Routing(12, 3, SIGMOID, is_renormalised=False, num_groups=3, top_groups=1),
    Routing(1, 1),
    pytest.param(Routing(256, 8, SIGMOID), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routing(routing: Routing, has_bias: bool, device: str) -> None:
    logits = torch.randn(5, routing.num_experts + 3, device=device)[:, : routing.num_experts]
    bias = torch.randn(routing.num_experts, device=device) if has_bias else None
    for found, expected in zip(
        route(logits, routing, bias), route_torch(logits, routing, bias), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_of_equal_scores_the_lower_expert_is_chosen_and_nan_before_all(device: str) -> None:
    """A row of NaN takes experts that there are, none of them twice."""
    logits = torch.zeros(4, 13, device=device)
    logits[1, [4, 9, 11]] = 1.0
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[3, 6] = 0.0
    topk_ids, topk_weights = route(logits, Routing(13, 3))
    assert topk_ids.tolist() == [[0, 1, 2], [4, 9, 11], [0, 1, 2], [6, 0, 1]]
    assert topk_weights[2].isnan().all()
    assert not topk_weights[[0, 1, 3]].isnan().any()


@pytest.mark.gpu
def test_ties_are_broken_as_torch_breaks_them_on_a_gpu(device: str) -> None:
    logits = torch.randint(4, (1000, 128), device=device).bfloat16()
    for routing in (Routing(128, 8), Routing(128, 8, SIGMOID)):
        found, expected = route(logits, routing)[0], route_torch(logits, routing)[0]
        assert torch.equal(found.sort(-1)[0], expected.sort(-1)[0])


def random_ids(num_tokens: int, num_experts: int, top_k: int, device: str) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts, device=device).topk(top_k, -1)[1].int()


@pytest.mark.parametrize("rows", [16, 64])
def test_sorting(rows: int, device: str) -> None:
    cases = [random_ids(n, 10, 3, device) for n in (1, 2, 7, 50, 700, 6000)]
    cases.append(torch.full((40, 1), 7, device=device).int())  # all meet one expert
    for topk_ids in cases:
        found = sort_by_expert(topk_ids, 10, rows)
        expected = sort_by_expert_torch(topk_ids, 10, rows)
        num_tiles = int((expected.tile_experts >= 0).sum())
        assert torch.equal(found.tile_experts, expected.tile_experts)
        used = slice(num_tiles * rows)
        assert torch.equal(found.sorted_pairs[used], expected.sorted_pairs[used])
        there = found.sorted_pairs[used][found.sorted_pairs[used] >= 0]
        assert sorted(there.tolist()) == list(range(topk_ids.numel())), "each pair once"


def experts(
    num_experts: int, hidden_size: int, size: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(num_experts, 2 * size, hidden_size, device=device) * hidden_size**-0.5
    down = torch.randn(num_experts, hidden_size, size, device=device) * size**-0.5
    return gate_up.to(dtype), down.to(dtype)


def grouped(
    tile: GroupedTile | None,
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu: ClampedSwiGLU | None = None,
) -> torch.Tensor:
    top_k = topk_ids.shape[1]
    tiles = grouped_tiles(topk_ids.numel(), len(gate_up), hidden.dtype, hidden.device)
    first, second = (tile, tile) if tile else tiles
    pairs = sort_by_expert(topk_ids, len(gate_up), first.rows)
    neurons = grouped_gate_up(hidden, gate_up, pairs, top_k, first, PLAIN, gate_up_bias, swiglu)
    outputs = grouped_down(neurons, down, pairs, topk_weights, second, PLAIN, down_bias)
    return combine(outputs, top_k, shared)


SIZES = [
    (3, 5, 2, 40, 24),
    (20, 4, 4, 64, 33),  # all tokens meet all experts
    (40, 6, 1, 33, 70),
    pytest.param(500, 128, 8, 2048, 768, marks=pytest.mark.gpu),
    pytest.param(3000, 60, 4, 200, 136, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "hidden_size", "size"), SIZES)
def test_grouped_products(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    wide = torch.randn(num_tokens, hidden_size + 8, device=device).to(dtype)
    hidden = wide[:, :hidden_size]
    weights = experts(num_experts, hidden_size, size, dtype, device)
    topk_ids = random_ids(num_tokens, num_experts, top_k, device)
    topk_weights = torch.rand(num_tokens, top_k, device=device)
    shared = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    biases = (
        (torch.randn(num_experts, 2 * size, device=device) * 2).to(dtype),
        torch.randn(num_experts, hidden_size, device=device).to(dtype),
    )
    swiglu = ClampedSwiGLU(1.702, 1.5)  # some gates and ups are beyond the limit
    for more in ((None,), (shared,), (None, *biases, swiglu)):
        inputs = hidden, *weights, topk_ids, topk_weights, *more
        exact: list[Any] = [
            each.double() if torch.is_tensor(each) and each.is_floating_point() else each
            for each in inputs
        ]
        tile = None if device == "cuda" else GroupedTile(16, 16, 32, 4, 2)
        error = relative_error(grouped(tile, *inputs), experts_torch(*exact))
        assert error < MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_one_token_is_routed_in_one_launch(
    routing: Routing, dtype: torch.dtype, device: str
) -> None:
    hidden = torch.randn(1, 70, device=device).to(dtype)
    router = torch.randn(routing.num_experts, 70, device=device)
    bias, arrivals = torch.randn(routing.num_experts, device=device), torch.zeros(1).int()
    arrivals = arrivals.to(device)
    for router_bias in (None, 3 * torch.randn(routing.num_experts, device=device)):
        # The second time with what the first has left
        found = route_one(
            hidden, router, routing, bias, arrivals, 16, launch=PLAIN, router_bias=router_bias
        )
        logits = (router.double() @ hidden[0].double())[None].float()
        logits += 0 if router_bias is None else router_bias
        topk_ids, topk_weights = route_torch(logits, routing, bias)
        assert torch.equal(found[0], topk_ids[0])
        wanted = torch.full((routing.top_k, 16), -1)
        wanted[:, 0] = torch.arange(routing.top_k)
        assert torch.equal(found[1].view(-1, 16).cpu(), wanted.int())
        torch.testing.assert_close(found[2], topk_weights)
    assert arrivals.item() == 0


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
@torch.inference_mode()
def test_a_layer_launches_what_its_twins_compute(family: str, num_tokens: int, device: str) -> None:
    config = build_small_model(family).config
    c, experts, linear = DecoderConfig.from_hf(config), experts_config(config), LinearMethod()
    mlp = MoEMLP.create(1, experts, c, linear, torch.float32, device)
    for each in mlp.stored("model.layers.1.mlp", c):
        if each.target is not None:
            each.target.normal_()
    hidden = torch.randn(num_tokens, c.hidden_size, device=device)
    twins = mlp(hidden, linear, Launch(uses_twins=True))
    torch.testing.assert_close(mlp(hidden, linear, PLAIN), twins, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_shared", [False, True])
def test_pairs_are_summed_added_and_normalised_in_one_launch(
    has_shared: bool, dtype: torch.dtype, device: str
) -> None:
    outputs = torch.randn(15, 45, device=device).to(dtype)
    shared = torch.randn(5, 45, device=device).to(dtype) if has_shared else None
    weight = torch.randn(45, device=device).to(dtype)
    residual = torch.randn(5, 90, device=device).to(dtype)[:, :45]
    expected_residual = residual.clone()
    summed = combine(outputs, 3, shared)
    expected = add_rms_norm(summed, expected_residual, weight, 1e-6)
    found = add_norm_of_pairs(
        add_rms_norm, Pairs(outputs, 3, shared), residual, weight, 1e-6, PLAIN
    )
    assert torch.equal(found, expected)
    assert torch.equal(residual, expected_residual)
    expected = add_rms_norm(summed, expected_residual, weight, 1e-6)
    assert torch.equal(
        add_norm_of_pairs(add_rms_norm, summed, residual, weight, 1e-6, PLAIN), expected
    )


@pytest.mark.parametrize("swiglu", [None, ClampedSwiGLU(1.702, 0.5)], ids=str)
def test_nan_of_a_row_stays_in_its_row_and_a_row_has_the_same_bits_in_any_batch(
    swiglu: ClampedSwiGLU | None, device: str
) -> None:
    routing = Routing(6, 2)
    weights = experts(6, 40, 24, torch.float32, device)
    hidden, logits = torch.randn(9, 40, device=device), torch.randn(9, 6, device=device)
    tile = GroupedTile(16, 16, 32, 4, 2)

    def compute(rows: list[int]) -> torch.Tensor:
        chosen = route(logits[rows], routing)
        return grouped(tile, hidden[rows], *weights, *chosen, None, None, None, swiglu)

    alone = compute(list(range(9)))
    for rows in itertools.islice(itertools.permutations(range(9), 5), 0, 9000, 4000):
        assert torch.equal(compute(list(rows)), alone[list(rows)])
    hidden[4] = logits[4] = torch.nan
    with_nan = compute(list(range(9)))
    others = [row for row in range(9) if row != 4]
    assert with_nan[4].isnan().all()
    assert torch.equal(with_nan[others], alone[others])
