"""Checks exercises/m2_flat_mask.py."""

import pytest
import torch

from engine_helpers import random_prompts, tiny_model

EXERCISE = ("m2_flat_mask.py", "flatten")

MIXED = [(0, 3), (4, 1)]
LENGTHS = [5, 9, 3, 14]


def wanted(rows):
    """Positions and mask, token by token and key by key."""
    tokens = [(row, start + i) for row, (start, num_new) in enumerate(rows) for i in range(num_new)]
    keys = [(row, p) for row, (start, num_new) in enumerate(rows) for p in range(start + num_new)]
    mask = [[key[0] == token[0] and key[1] <= token[1] for key in keys] for token in tokens]
    return [position for _, position in tokens], mask


def drawn(mask):
    return "\n".join("".join("1" if cell else "." for cell in row) for row in mask)


def check_rows(flatten, rows):
    positions, mask = flatten(rows)
    right_positions, right_mask = wanted(rows)
    assert positions.tolist() == right_positions, (
        f"rows {rows}: positions should be {right_positions}, yours are {positions.tolist()}"
    )
    assert mask.dtype == torch.bool, f"the mask should be bool, it is {mask.dtype}"
    assert mask.tolist() == right_mask, (
        f"rows {rows}: the mask should be\n{drawn(right_mask)}\nyours is\n{drawn(mask.tolist())}"
    )


@torch.inference_mode()
def num_right(flatten):
    """Prompts whose next token in a flat batch is the one that they get alone."""
    model, prompts = tiny_model("gpt2"), random_prompts(LENGTHS)
    positions, mask = flatten([(0, len(prompt)) for prompt in prompts])
    flat = torch.tensor([[token for prompt in prompts for token in prompt]])
    output = model(flat, position_ids=positions[None], attention_mask=mask[None, None])
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    together = output.logits[0, last].argmax(-1).tolist()
    alone = [int(model(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]
    return sum(a == b for a, b in zip(alone, together, strict=True))


def share_of_scores(flatten):
    mask = flatten([(0, length) for length in LENGTHS])[1]
    return mask.float().mean().item()


def one_causal_mask(rows):
    """As if all tokens were one prompt."""
    positions, mask = wanted(rows)
    num_tokens, num_keys = len(mask), len(mask[0])
    return torch.tensor(positions), torch.ones(num_tokens, num_keys, dtype=torch.bool).tril()


def test_a_prompt_and_a_decode_row(exercise):
    check_rows(exercise, MIXED)


@pytest.mark.parametrize("rows", [[(0, 1)], [(7, 1), (2, 1), (0, 1)], [(0, 4), (3, 2), (5, 1)]])
def test_other_rows(exercise, rows):
    check_rows(exercise, rows)


def test_a_flat_batch_gives_what_each_prompt_gives_alone(exercise, figure):
    right, total = num_right(exercise), len(LENGTHS)
    figure("right next tokens", f"{right} of {total}", f"{num_right(one_causal_mask)} (causal)")
    share, before = share_of_scores(exercise), share_of_scores(one_causal_mask)
    figure("share of the scores that is needed", f"{share:.0%}", f"{before:.0%}")
    assert right == total, f"{right} of {total} next tokens are those of the prompt alone"


def test_many_rows_are_done_without_a_loop_over_tokens(exercise):
    counted = CountsOperations()
    with counted:
        exercise([(0, 300), (299, 1)])
    assert counted.number < 100, (
        f"{counted.number} tensor operations for 301 tokens: that is a loop over tokens"
    )


class CountsOperations(torch.overrides.TorchFunctionMode):
    """Counts calls of torch functions."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.number += 1
        return function(*arguments, **(keywords or {}))


def test_one_causal_mask_over_all_is_caught():
    assert num_right(one_causal_mask) < len(LENGTHS)
    with pytest.raises(AssertionError, match="the mask should be"):
        check_rows(one_causal_mask, MIXED)


def test_positions_that_begin_at_0_in_every_row_are_caught():
    def from_zero(rows):
        _, mask = wanted(rows)
        return torch.cat([torch.arange(num_new) for _, num_new in rows]), torch.tensor(mask)

    with pytest.raises(AssertionError, match=r"positions should be \[0, 1, 2, 4\], yours are"):
        check_rows(from_zero, MIXED)


def test_a_mask_without_time_is_caught():
    def sees_the_future(rows):
        positions, _ = wanted(rows)
        blocks = [torch.ones(num_new, start + num_new) for start, num_new in rows]
        return torch.tensor(positions), torch.block_diag(*blocks).bool()

    with pytest.raises(AssertionError, match="the mask should be"):
        check_rows(sees_the_future, MIXED)
