"""Checks exercises/m5_sort_by_expert.py."""

import pytest
import torch

from m5_kernels.extras.experts.sorting import most_tiles, sort_by_expert_torch

EXERCISE = ("m5_sort_by_expert.py", "sort_by_expert")

CASES = {
    "the example": ([[2, 0], [2, 1], [0, 2]], 3, 2),
    "one token": ([[5, 1, 3]], 8, 4),
    "all meet one expert": ([[1]] * 7, 4, 2),
    "full tiles": ([[0, 1], [1, 0], [0, 1], [1, 0]], 2, 4),
    "the first and the last expert are not met": ([[3, 1], [1, 3], [2, 1]], 6, 2),
}


def without_padding(topk_ids, num_experts, rows, max_tiles):
    """Sorts, and begins the next expert in the tile of the one before."""
    ids = topk_ids.flatten()
    order = ids.argsort(stable=True)
    sorted_pairs = ids.new_full((max_tiles * rows,), -1)
    sorted_pairs[: len(ids)] = order
    tile_experts = ids.new_full((max_tiles,), -1)
    firsts = ids[order][::rows]
    tile_experts[: len(firsts)] = firsts
    return sorted_pairs, tile_experts


WRONG, TOLD = without_padding, "a tile belongs to one expert"


@pytest.mark.parametrize("case", CASES)
def test_pairs_come_together_in_tiles(exercise, case):
    topk_ids, num_experts, rows = CASES[case]
    topk_ids = torch.tensor(topk_ids)
    max_tiles = most_tiles(topk_ids.numel(), num_experts, rows) + 1
    found = exercise(topk_ids, num_experts, rows, max_tiles)
    right = [each.tolist() for each in sort_by_expert_torch(topk_ids, num_experts, rows)]
    right = [right[0] + [-1] * rows, right[1] + [-1]]
    given = f"topk_ids {topk_ids.tolist()}, {num_experts} experts, tiles of {rows} rows"
    pairs, experts = (each.tolist() for each in found)
    ids = topk_ids.flatten().tolist()
    for tile, own in enumerate(zip(*[iter(pairs)] * rows, strict=True)):
        met = {ids[pair] for pair in own if pair >= 0}
        assert len(met) <= 1, f"{given}: a tile belongs to one expert, tile {tile} has {met}"
    for name, own, wanted in zip(
        ("sorted_pairs", "tile_experts"), (pairs, experts), right, strict=True
    ):
        assert own == wanted, f"{given}: {name} should be {wanted}, yours is {own}"


def test_nothing_waits_for_the_device(exercise):
    exercise(torch.tensor([[0, 1]]), 4, 2, 6)  # solved at all
    meta = torch.empty(3, 2, dtype=torch.int64, device="meta")
    try:
        result = exercise(meta, 4, 2, 6)
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(
            "your code does not run on tensors without values. Either it reads a value, or a shape "
            f"depends on one, or a new tensor is on another device. torch says: {error}"
        ) from None
    shapes = [tuple(tensor.shape) for tensor in result]
    assert shapes == [(12,), (6,)], f"shapes {shapes}, not [(12,), (6,)]"
