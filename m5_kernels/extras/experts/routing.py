"""Routing: which experts a token meets, and with which weights.

    logits [num_tokens, num_experts]    one linear layer, the router
    scores                              softmax or sigmoid of a row, in fp32
    topk_ids, topk_weights              the `top_k` best of each row, the best first

One warp routes a token: it takes the best expert `top_k` times. For a single token one kernel does
all of it, the router's product too: the program that is done last chooses, and each expert that it
has chosen is a tile (`sorting`).

Papers: Shazeer et al., Outrageously Large Neural Networks (2017); Fedus et al., Switch Transformers
(2021). Groups and the correction bias: DeepSeek-V3 (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.triton_or_twin import next_power_of_2, tl, triton

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 0, 1, 2
"""How logits become scores. The last one chooses by logits, and weighs only what was chosen."""


@dataclass(frozen=True)
class Routing:
    """How a model family chooses experts. The defaults are those of most families."""

    num_experts: int
    top_k: int
    scoring: int = SOFTMAX
    is_renormalised: bool = True
    """Whether the weights of a token are divided by their sum."""
    least_sum: float = 0.0
    """A smaller sum is not divided by."""
    scale: float = 1.0
    """Factor of all weights, after everything else."""
    num_groups: int = 1
    """Experts are in so many groups, of equal size and next to each other."""
    top_groups: int = 1
    """Only experts of the best groups are chosen. A group is as good as its two best experts."""

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the kernels that choose experts."""
        return {
            "NUM_EXPERTS": self.num_experts,
            "EXPERTS": next_power_of_2(self.num_experts),
            "TOP_K": self.top_k,
            "SCORING": self.scoring,
            "IS_RENORMALISED": self.is_renormalised,
            "NUM_GROUPS": self.num_groups,
            "TOP_GROUPS": self.top_groups,
        }

    @property
    def num_warps(self) -> int:
        """Warps of a program. Groups are found by comparing all experts with all."""
        return 1 if self.num_groups == 1 else 16


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    launch: Launch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, int32, and their weights, fp32: both `[num_tokens, top_k]`.

    Of equal scores the one of the lower expert is better, as for `torch.topk` on a GPU. NaN is
    better than any number.

    Args:
        logits: `[num_tokens, num_experts]`, rows contiguous.
        bias: fp32 `[num_experts]`, added to the scores for the choice, but not to the weights.
        topk_ids: where the experts are written; None: into new memory.
    """
    num_tokens = len(logits)
    if topk_ids is None:
        topk_ids = logits.new_empty(num_tokens, routing.top_k, dtype=torch.int32)
    if not launch.runs_triton(logits):
        ids, weights = route_torch(logits, routing, bias)
        return topk_ids.copy_(ids), weights
    topk_weights = logits.new_empty(num_tokens, routing.top_k, dtype=torch.float32)
    if num_tokens:
        launch.kernel(_route_kernel, (num_tokens,))(
            logits, bias, topk_ids, topk_weights,
            logits.stride(0), routing.least_sum, routing.scale,
            **routing.constants,
            num_warps=routing.num_warps,
            **launch.pdl_options(),
        )  # fmt: skip
    return topk_ids, topk_weights


@triton.jit(do_not_specialize=["least_sum", "scale"])
def _route_kernel(
    logits, bias, topk_ids, topk_weights,
    stride, least_sum, scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    ranks, weights = choose_experts(
        logits + token * stride, bias, least_sum, scale,
        NUM_EXPERTS, EXPERTS, TOP_K, SCORING, IS_RENORMALISED, NUM_GROUPS, TOP_GROUPS,
    )  # fmt: skip
    is_chosen = ranks < TOP_K
    tl.store(topk_ids + token * TOP_K + ranks, tl.arange(0, EXPERTS), mask=is_chosen)
    tl.store(topk_weights + token * TOP_K + ranks, weights, mask=is_chosen)


def route_one(
    hidden: torch.Tensor,
    router: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    rows: int,
    topk_ids: torch.Tensor | None = None,
    launch: Launch = PLAIN,
    router_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route a single token. Runs as a kernel alone: for more tokens there are three.

    Args:
        hidden: `[1, in_size]`; router: `[num_experts, in_size]`, contiguous.
        arrivals: int32 `[1]`, zero before and after.
        rows: of a tile.
        topk_ids: where the experts are written; None: into new memory.
        router_bias: `[num_experts]`, added to the logits, or None. `bias` is that of the choice.

    Returns:
        The experts that were chosen, int32 `[top_k]`, each a tile (`SortedPairs.tile_experts`); the
        rows of the tiles, of which only the first is used (`sorted_pairs`); weights `[1, top_k]`.
    """
    top_k = routing.top_k
    if topk_ids is None:
        topk_ids = hidden.new_empty(top_k, dtype=torch.int32)
    sorted_pairs = hidden.new_empty(top_k * rows, dtype=torch.int32)
    topk_weights = hidden.new_empty(1, top_k, dtype=torch.float32)
    logits = router.new_empty(routing.num_experts)
    in_size = router.shape[1]
    launch.kernel(_route_one_kernel, (routing.num_experts,))(
        hidden, router, router_bias, bias, logits, arrivals, topk_ids, sorted_pairs, topk_weights,
        routing.least_sum, routing.scale,
        **routing.constants,
        IN_SIZE=in_size,
        BLOCK=next_power_of_2(in_size),
        ROWS=rows,
        num_warps=routing.num_warps,
        **launch.pdl_options(),
    )  # fmt: skip
    return topk_ids, sorted_pairs, topk_weights


@triton.jit(do_not_specialize=["least_sum", "scale"])
def _route_one_kernel(
    hidden, router, router_bias, bias, logits, arrivals, topk_ids, sorted_pairs, topk_weights,
    least_sum, scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    IN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    inputs = tl.arange(0, BLOCK)
    w = tl.load(router + expert * IN_SIZE + inputs, mask=inputs < IN_SIZE, other=0.0)
    wait_for_previous(PDL)
    h = tl.load(hidden + inputs, mask=inputs < IN_SIZE, other=0.0)
    logit = tl.sum(w.to(tl.float32) * h.to(tl.float32), 0)
    if router_bias is not None:
        logit += tl.load(router_bias + expert).to(tl.float32)
    tl.store(logits + expert, logit.to(logits.dtype.element_ty))
    # All threads must have stored before the count goes up: the last program reads it all.
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == NUM_EXPERTS - 1:
        ranks, weights = choose_experts(
            logits, bias, least_sum, scale,
            NUM_EXPERTS, EXPERTS, TOP_K, SCORING, IS_RENORMALISED, NUM_GROUPS, TOP_GROUPS,
        )  # fmt: skip
        is_chosen = ranks < TOP_K
        tl.store(topk_ids + ranks, tl.arange(0, EXPERTS), mask=is_chosen)
        tl.store(topk_weights + ranks, weights, mask=is_chosen)
        row = tl.arange(0, ROWS)
        for choice in tl.static_range(TOP_K):
            tl.store(sorted_pairs + choice * ROWS + row, tl.where(row == 0, choice, -1))
        tl.store(arrivals, 0)  # as the next launch expects it


@triton.jit
def choose_experts(
    logits, bias, least_sum, scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return rank and weight of each expert for one token, both `[EXPERTS]`.

    Those with ranks below TOP_K are chosen; the others have rank TOP_K and a weight without
    meaning.
    """
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < NUM_EXPERTS
    values = tl.load(logits + expert, mask=is_expert, other=-float("inf"), cache_modifier=".cg").to(
        tl.float32
    )
    if SCORING == 1:
        scores = tl.sigmoid(values)
    elif SCORING == 0:
        powers = tl.exp(values - tl.max(values, 0))
        scores = powers / tl.sum(powers, 0)
    else:
        scores = values
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, mask=is_expert, other=0.0)
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(is_expert, choice, -float("inf"))
    if NUM_GROUPS > 1:
        SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        group = tl.where(is_expert, expert // SIZE, NUM_GROUPS)
        is_same = group[:, None] == group[None, :]
        better = _is_better(choice, expert)
        rank_in_group = tl.sum((better & is_same).to(tl.int32), 1)
        of_two_best = tl.where(rank_in_group < 2, choice, 0.0)
        group_scores = tl.sum(tl.where(is_same, of_two_best[None, :], 0.0), 1)
        group_scores = tl.where(is_expert, group_scores, -float("inf"))
        is_first = is_expert & (expert % SIZE == 0)  # it speaks for its group
        better = _is_better(group_scores, group) & is_first[None, :]
        group_rank = tl.sum(better.to(tl.int32), 1)
        choice = tl.where(is_expert & (group_rank < TOP_GROUPS), choice, -float("inf"))
    # A key sorts like a score. It has 32 bits: a warp finds the best of those with one instruction,
    # and with another the lowest expert that has it.
    bits = (choice + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ranks = tl.full([EXPERTS], TOP_K, tl.int32)
    for rank in tl.static_range(TOP_K):
        is_best = keys == tl.max(keys, 0)
        is_first = expert == tl.min(tl.where(is_best, expert, EXPERTS), 0)
        ranks = tl.where(is_first, rank, ranks)
        keys = tl.where(is_first, -(2**31), keys)
    is_chosen = ranks < TOP_K
    if SCORING == 2:
        powers = tl.where(is_chosen, tl.exp(values - tl.max(values, 0)), 0.0)
        scores = powers / tl.sum(powers, 0)
    if IS_RENORMALISED:
        total = tl.sum(tl.where(is_chosen, scores, 0.0), 0)
        scores = scores / tl.where(total < least_sum, least_sum, total)
    return ranks, scores * scale


@triton.jit
def _is_better(values, index):
    """Return, for each pair of rows and columns, whether the column's value ranks before."""
    is_equal = values[None, :] == values[:, None]
    return (values[None, :] > values[:, None]) | (is_equal & (index[None, :] < index[:, None]))


def route_torch(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specify `route`. Of equal scores it takes the one that `torch.topk` takes on this device."""
    values = logits.float()
    scores = values
    if routing.scoring == SIGMOID:
        scores = values.sigmoid()
    elif routing.scoring == SOFTMAX:
        scores = values.softmax(-1)
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, -1)
        best = groups.topk(2, -1)[0].sum(-1).topk(routing.top_groups, -1)[1]
        is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
    topk_ids = choice.topk(routing.top_k, -1)[1]
    weights = scores.gather(1, topk_ids)
    if routing.scoring == SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if routing.is_renormalised:
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.clamp(min=routing.least_sum)
    return topk_ids.int(), weights * routing.scale
