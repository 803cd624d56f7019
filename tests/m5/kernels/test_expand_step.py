"""Metadata expansion and the append of sampled tokens against their twins."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from helpers.m5_models import same_metadata
from m5_kernels.device_state import DeviceState
from m5_kernels.kernels.expand_groups import expand_groups, expand_groups_torch
from m5_kernels.kernels.expand_step import (
    append_sampled,
    append_sampled_torch,
    expand_step,
    expand_step_torch,
)
from m5_kernels.kernels.launch import PLAIN
from m5_kernels.kernels.step_metadata import StepMetadata


def check(
    device: str,
    rows: list[int],
    num_new: list[int],
    num_tokens: int,
    block_size: int = 4,
    max_model_len: int = 60,
    num_rows: int = 8,
) -> None:
    whole = DeviceState(
        num_rows, max_model_len, block_size, 1000, torch.device(device), num_groups=3
    )
    whole.block_tables.random_(0, 500)
    state = whole.rows
    state.token_ids.random_(0, 1000)
    state.num_computed_tokens.random_(0, max_model_len // 2)
    state.prompt_lens.random_(1, max_model_len // 2)
    row_ids = torch.tensor(rows, dtype=torch.int32, device=device)
    new = torch.tensor(num_new, dtype=torch.int32, device=device)
    first = same_metadata(
        expand_step, expand_step_torch, state, row_ids, new, num_tokens=num_tokens
    )
    first = replace(first, num_chunks=sum(number > 1 for number in num_new))
    check_groups(whole, row_ids, new, first, block_size)
    sampled = torch.randint(-1, 99, (len(rows),), dtype=torch.int32, device=device)
    other = copy.deepcopy(state)
    samples = torch.randint(0, 2, (len(rows),), dtype=torch.int32, device=device)
    append_sampled(state, row_ids, new, samples, sampled)
    append_sampled_torch(other, row_ids, new, samples, sampled)
    assert torch.equal(state.token_ids, other.token_ids)
    assert torch.equal(state.num_computed_tokens, other.num_computed_tokens)


def check_groups(
    state: DeviceState,
    row_ids: torch.Tensor,
    num_new: torch.Tensor,
    first: StepMetadata,
    block_size: int,
) -> None:
    """`expand_groups` and its twin give what `expand_step` gives with the tables of each group."""
    for expand in (expand_groups, expand_groups_torch):
        shape = 2, len(first.slot_mapping)
        slots = torch.full(shape, -77, dtype=torch.int64, device=row_ids.device)
        tables = first.block_table.new_full((2, *first.block_table.shape), -77)
        launch = [PLAIN] if expand is expand_groups else []
        expand(state.block_tables, row_ids, first, slots, tables, block_size, *launch)
        for group in (1, 2):
            own = replace(first, slot_mapping=slots[0].clone(), block_table=tables[0].clone())
            own.block_table.fill_(-77)
            rows = replace(state.rows, block_table=state.block_tables[group])
            expand_step_torch(rows, row_ids, num_new, own)
            assert torch.equal(slots[group - 1], own.slot_mapping)
            assert torch.equal(tables[group - 1], own.block_table)


@pytest.mark.parametrize(
    ("rows", "num_new", "num_tokens", "sizes"),
    [
        *((rows, [1] * len(rows), len(rows), {}) for rows in ([0], [-1], [3, 0, -1, -1])),
        ([7, 6, 5, 4, 3, 2, 1, 0], [1] * 8, 8, {}),
        # chunks, and padding tokens
        ([0], [5], 5, {}),
        ([4, 2, 0], [1, 17, 2], 32, {}),
        ([1, 3, -1], [1, 9, 0], 10, {}),
        ([1, 5, 3, 0, -1, -1], [1, 1, 9, 2, 7, 7], 33, {}),
        *(([3, 1], [20, 1], 24, {"block_size": size}) for size in (1, 3, 16, 256)),
        # more tokens than a program takes; a block table longer than one
        ([1, 0], [300, 150], 460, {"max_model_len": 1000}),
        ([1, 0, 2], [1, 1, 1], 3, {"block_size": 1, "max_model_len": 900}),
    ],
    ids=str,
)
def test_equals_its_twin(
    rows: list[int], num_new: list[int], num_tokens: int, sizes: dict[str, int], device: str
) -> None:
    check(device, rows, num_new, num_tokens, **sizes)


def test_a_full_row_takes_no_token(device: str) -> None:
    state = DeviceState(2, 4, 2, 10, torch.device(device)).rows
    state.num_computed_tokens.copy_(torch.tensor([3, 2]))
    row_ids = torch.tensor([0, 1], dtype=torch.int32, device=device)
    ones = torch.ones(2, dtype=torch.int32, device=device)
    sampled = torch.tensor([8, 9], dtype=torch.int32, device=device)
    append_sampled(state, row_ids, ones, ones, sampled)
    assert state.num_computed_tokens.tolist() == [4, 3]
    assert state.token_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 9]]


@pytest.mark.gpu
def test_many_rows() -> None:
    rows = torch.randperm(500)[:256].tolist()
    check("cuda", rows, [1] * 256, 256, 16, 4096, 500)
    check("cuda", rows, torch.randint(1, 40, (256,)).tolist(), 40 * 256, 16, 4096, 500)
