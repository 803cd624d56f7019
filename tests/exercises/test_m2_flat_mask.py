"""Checks exercises/m2_flat_mask.py."""

import torch

from helpers.engines import random_prompts, tiny_model

EXERCISE = ("m2_flat_mask.py", "flatten")
LENGTHS = [5, 9, 3, 14]
PROMPTS = [(0, length) for length in LENGTHS]


def wanted(rows):
    """Positions and mask, token by token and key by key."""
    tokens = [(row, start + i) for row, (start, num_new) in enumerate(rows) for i in range(num_new)]
    keys = [(row, p) for row, (start, num_new) in enumerate(rows) for p in range(start + num_new)]
    mask = [[key[0] == token[0] and key[1] <= token[1] for key in keys] for token in tokens]
    return [position for _, position in tokens], mask


def one_causal_mask(rows):
    """As if all tokens were one prompt."""
    positions, mask = wanted(rows)
    num_tokens, num_keys = len(mask), len(mask[0])
    return torch.tensor(positions), torch.ones(num_tokens, num_keys, dtype=torch.bool).tril()


WRONG, TOLD = one_causal_mask, "the mask should be"


def drawn(mask):
    return "\n".join("".join("1" if cell else "." for cell in row) for row in mask)


def test_positions_and_mask(exercise):
    for rows in (
        [(0, 3), (4, 1)],
        [(0, 1)],
        [(7, 1), (2, 1), (0, 1)],
        [(0, 4), (3, 2), (5, 1)],
    ):
        positions, mask = exercise(rows)
        right_positions, right_mask = wanted(rows)
        assert positions.tolist() == right_positions, (
            f"rows {rows}: positions should be {right_positions}, yours are {positions.tolist()}"
        )
        assert mask.dtype == torch.bool, f"the mask should be bool, it is {mask.dtype}"
        assert mask.tolist() == right_mask, (
            f"rows {rows}: the mask should be\n{drawn(right_mask)}\nyours is\n"
            f"{drawn(mask.tolist())}"
        )


@torch.inference_mode()
def num_right(flatten):
    """Prompts whose next token in a flat batch is the one that they get alone."""
    model, prompts = tiny_model("gpt2"), random_prompts(LENGTHS)
    positions, mask = flatten(PROMPTS)
    flat = torch.tensor([[token for prompt in prompts for token in prompt]])
    output = model(flat, position_ids=positions[None], attention_mask=mask[None, None])
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    together = output.logits[0, last].argmax(-1).tolist()
    alone = [int(model(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]
    return sum(a == b for a, b in zip(alone, together, strict=True))


def test_a_flat_batch_gives_what_each_prompt_gives_alone(exercise, figure):
    right, total = num_right(exercise), len(LENGTHS)
    figure("right next tokens", f"{right} of {total}", f"{num_right(one_causal_mask)} (causal)")
    share, before = (float(each(PROMPTS)[1].float().mean()) for each in (exercise, one_causal_mask))
    figure("share of the scores that is needed", f"{share:.0%}", f"{before:.0%}")
    assert right == total, f"{right} of {total} next tokens are those of the prompt alone"


class CountsOperations(torch.overrides.TorchFunctionMode):
    """Counts calls of torch functions."""

    number = 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.number += 1
        return function(*arguments, **(keywords or {}))


def test_many_rows_are_done_without_a_loop_over_tokens(exercise):
    with CountsOperations() as counted:
        exercise([(0, 300), (299, 1)])
    assert counted.number < 100, (
        f"{counted.number} tensor operations for 301 tokens: that is a loop over tokens"
    )
