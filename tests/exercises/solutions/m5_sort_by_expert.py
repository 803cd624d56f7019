from __future__ import annotations

import torch


def sort_by_expert(
    topk_ids: torch.Tensor, num_experts: int, rows: int, max_tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = topk_ids.flatten()
    order = ids.argsort(stable=True)
    counts = ids.new_zeros(num_experts).scatter_add(0, ids, torch.ones_like(ids))
    tiles = (counts + rows - 1) // rows
    ends = tiles.cumsum(0)
    tile = torch.arange(max_tiles, device=ids.device)
    owners = torch.searchsorted(ends, tile, right=True)
    tile_experts = torch.where(tile < ends[-1], owners, -1)
    sorted_ids = ids[order]
    first_row = ((ends - tiles) * rows)[sorted_ids]
    first_pair = (counts.cumsum(0) - counts)[sorted_ids]
    places = first_row + torch.arange(len(ids), device=ids.device) - first_pair
    unused = ids.new_full((max_tiles * rows,), -1)
    return unused.scatter(0, places, order), tile_experts
