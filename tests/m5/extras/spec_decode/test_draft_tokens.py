"""Guesses of n-grams, their places in a step, and their verification, against their twins."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.m5_models import same_metadata
from m4_prefix_chunked.ngram import NgramProposer
from m5_kernels.device_state import DeviceState
from m5_kernels.extras.spec_decode.draft_tokens import (
    MAX_DRAFTS,
    MISSING,
    REJECTED,
    accept,
    accept_torch,
    expand_drafts,
    expand_drafts_torch,
    propose,
    propose_torch,
)
from m5_kernels.kernels.step_metadata import RowState, StepMetadata
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams


def state_of(
    device: str, num_known: list[int], vocab_size: int, max_model_len: int, block_size: int = 4
) -> RowState:
    """Rows of tokens of which all but the last are computed; behind them anything."""
    state = DeviceState(
        len(num_known), max_model_len, block_size, vocab_size, torch.device(device)
    ).rows
    state.token_ids.random_(0, vocab_size)
    state.block_table.random_(0, 500)
    state.num_computed_tokens[:] = torch.tensor(num_known) - 1
    return state


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check_propose(device: str, num_known: list[int], vocab_size: int, max_model_len: int) -> int:
    state = state_of(device, num_known, vocab_size, max_model_len)
    other = copy.deepcopy(state)
    rows = [*range(len(num_known)), -1]
    wanted = [1 + row % 5 if row % 7 else 0 for row in rows]
    found, expected = (ints([0] * len(num_known), device) for _ in range(2))
    propose(state, found, ints(rows, device), ints(wanted, device))
    propose_torch(other, expected, ints(rows, device), ints(wanted, device))
    assert torch.equal(found, expected)
    assert torch.equal(state.token_ids, other.token_ids)
    num_drafts = 0
    for row, (known, want) in enumerate(zip(num_known, wanted[:-1], strict=True)):
        tokens = state.token_ids[row].tolist()
        request = Request("r", tokens[:known], SamplingParams())
        guesses = NgramProposer().propose(request, want) if want else []
        assert int(found[row]) == len(guesses)
        assert tokens[known : known + len(guesses)] == guesses
        num_drafts += len(guesses)
    return num_drafts


@pytest.mark.parametrize("vocab_size", [2, 5, 12, 1000])
def test_guesses_are_those_of_the_host(device, vocab_size):
    lengths = [1, 2, 3, 4, 5, 6, 9, 17, 30, 40, 50, 3, 2]
    num_drafts = check_propose(device, lengths, vocab_size, max_model_len=64)
    assert num_drafts > 8 or vocab_size > 2


def test_long_requests_are_searched_whole(device):
    """Several times a program's block, with the match in each of them."""
    state = state_of(device, [3000] * 3, 100_000, 3100)
    for row, place in enumerate((5, 1500, 2900)):
        state.token_ids[row, place : place + 3] = state.token_ids[row, 2997:3000]
    found = ints([0] * 3, device)
    propose(state, found, ints([0, 1, 2], device), ints([3, 3, 3], device))
    assert found.tolist() == [3, 3, 3]
    for row, place in enumerate((5, 1500, 2900)):
        guesses = state.token_ids[row, 3000:3003]
        assert torch.equal(guesses, state.token_ids[row, place + 3 : place + 6])


def places_of(num_drafts: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and offsets of places: one for each row, and one for each of its guesses; padding."""
    rows = [row for row, guesses in enumerate(num_drafts) for _ in range(1 + guesses)]
    offsets = [offset for guesses in num_drafts for offset in range(1 + guesses)]
    return ints([*rows, -1, -1], device), ints([*offsets, 0, 0], device)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_kept_as_far_as_guesses_come_true(device, seed):
    """Two words, so that guesses often do; some rows were left without the guesses they had."""
    generator = torch.Generator().manual_seed(seed)
    num_drafts = torch.randint(0, 5, (60,), generator=generator).tolist()
    state = state_of(device, [3] * 60, 2, 16)
    rows, offsets = places_of(num_drafts, device)
    has_any = torch.randint(0, 4, (60,), generator=generator) > 0
    made = (torch.tensor(num_drafts) * has_any).int().to(device)
    sampled = torch.randint(-1, 2, (len(rows),), generator=generator).int().to(device)
    last_rows, tokens = accept(state, made, rows, offsets, sampled)
    wanted_rows, wanted = accept_torch(state, made, rows, offsets, sampled)
    assert torch.equal(last_rows, wanted_rows)
    assert torch.equal(tokens, wanted)
    assert sorted(last_rows[last_rows >= 0].tolist()) == list(range(60)), "each row ends once"


def test_what_was_sampled_behind_a_wrong_guess_is_rejected(device):
    state = state_of(device, [2, 2, 2], 9, 16)
    state.token_ids[:, 2:5] = ints([5, 6, 7], device)
    num_drafts = ints([3, 3, 0], device)
    rows, offsets = places_of([3, 3, 3], device)
    sampled = ints([5, 6, 7, 8, 5, 1, 7, 8, 5, 6, 7, 8, 4, 4], device)
    last_rows, tokens = accept(state, num_drafts, rows, offsets, sampled)
    assert last_rows.tolist() == [-1, -1, -1, 0, -1, 1, -1, -1, 2, -1, -1, -1, -1, -1]
    gone, none = REJECTED, MISSING
    assert tokens[:-2].tolist() == [5, 6, 7, 8, 5, 1, gone, gone, 5, none, none, none]


def expanded(
    state: RowState, num_drafts: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor
) -> StepMetadata:
    arguments = state, num_drafts, rows, offsets
    return same_metadata(expand_drafts, expand_drafts_torch, *arguments, num_tokens=len(rows))


def test_a_guess_is_a_place_of_its_own_and_a_missing_one_is_padding(device):
    state = state_of(device, [6, 9, 3, 7], 99, 40)
    rows, offsets = places_of([3, 2, 1, 0], device)
    output = expanded(state, ints([3, 0, 1, 0], device), rows, offsets)
    assert output.context_lens.tolist() == [6, 7, 8, 9, 9, 0, 0, 3, 4, 7, 0, 0]
    assert output.decode_lens.tolist() == output.context_lens.tolist()
    assert output.positions.tolist() == [5, 6, 7, 8, 8, 0, 0, 2, 3, 6, 0, 0]
    assert output.input_ids[1] == state.token_ids[0, 6]
    assert output.slot_mapping[:10].tolist().count(-1) == 2


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_rows", [1, 9, 40])
def test_any_places(device, num_rows, block_size):
    """Rows in any order, some without guesses, some idle; long contexts, too."""
    state = state_of(device, torch.randint(1, 400, (num_rows,)).tolist(), 99, 420, block_size)
    state.prompt_lens.random_(1, 200)
    wanted = torch.randint(0, MAX_DRAFTS + 1, (num_rows,))
    has_any = torch.randint(0, 4, (num_rows,)) > 0
    places = [
        (row, offset)
        for row in torch.randperm(num_rows).tolist()
        for offset in range(1 + int(wanted[row]))
    ]
    for _ in range(3):
        places.insert(int(torch.randint(len(places) + 1, ())), (-1, 0))
    rows, offsets = zip(*places, strict=True)
    expanded(
        state, (wanted * has_any).int().to(device), ints([*rows], device), ints([*offsets], device)
    )
