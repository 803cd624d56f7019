"""Checks exercises/m1_left_padding.py."""

import pytest
import torch

from engine_helpers import random_prompts, tiny_model

EXERCISE = ("m1_left_padding.py", "pad_left")
NAMES = ("input_ids", "attention_mask", "position_ids")
FAMILIES = ("llama", "gpt2")  # rotary and learned positions

SMALL = [[7, 8, 9], [4, 5, 6, 7, 8]]
SMALL_PADDED = (
    [[0, 0, 7, 8, 9], [4, 5, 6, 7, 8]],
    [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]],
)


@torch.inference_mode()
def num_right(pad_left):
    """Prompts whose next token in the batch is the one that they get alone, over two models."""
    prompts = random_prompts([3, 11, 7, 24])
    tensors = dict(zip(NAMES, pad_left(prompts), strict=True))
    count = 0
    for family in FAMILIES:
        model = tiny_model(family)
        alone = [model(torch.tensor([prompt])).logits[0, -1].argmax() for prompt in prompts]
        together = model(**tensors).logits[:, -1].argmax(-1)
        count += sum(a == b for a, b in zip(alone, together, strict=True))
    return int(count), len(prompts) * len(FAMILIES)


def check_tensors(pad_left, prompts, wanted, pad_id=0):
    for name, tensor, rows in zip(NAMES, pad_left(prompts, pad_id), wanted, strict=True):
        assert tensor.dtype == torch.int64, f"{name} should be int64, it is {tensor.dtype}"
        assert tensor.tolist() == rows, (
            f"prompts {prompts}, pad id {pad_id}: {name} should be\n{torch.tensor(rows)}, "
            f"yours is\n{tensor}"
        )


def check_a_pad_id_in_a_prompt_is_a_token(pad_left):
    check_tensors(
        pad_left,
        [[5, 3], [3, 3, 3]],
        ([[3, 5, 3], [3, 3, 3]], [[0, 1, 1], [1, 1, 1]], [[0, 0, 1], [0, 1, 2]]),
        pad_id=3,
    )


def padded_on_the_right(prompts, pad_id=0):
    width = max(map(len, prompts))
    input_ids = torch.tensor([prompt + [pad_id] * (width - len(prompt)) for prompt in prompts])
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    positions = torch.arange(width).expand_as(input_ids)
    return input_ids, (positions < lengths).long(), positions


def test_two_prompts(exercise):
    check_tensors(exercise, SMALL, SMALL_PADDED)


def test_a_pad_id_in_a_prompt_is_a_token(exercise):
    check_a_pad_id_in_a_prompt_is_a_token(exercise)


def test_the_next_tokens_are_those_of_each_prompt_alone(exercise, figure):
    right, total = num_right(exercise)
    before, _ = num_right(padded_on_the_right)
    figure("right next tokens", f"{right} of {total}", f"{before} (padded on the right)")
    assert right == total, f"{right} of {total} next tokens are those of the prompt alone"


def test_padding_on_the_right_is_caught():
    right, total = num_right(padded_on_the_right)
    assert right < total, "in the last column of a short row is padding"
    with pytest.raises(AssertionError, match="input_ids should be"):
        check_tensors(padded_on_the_right, SMALL, SMALL_PADDED)


def test_positions_that_count_padding_are_caught():
    def counts_padding(prompts, pad_id=0):
        width = max(map(len, prompts))
        rows = [[pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        input_ids = torch.tensor(rows)
        return input_ids, torch.tensor(masks), torch.arange(width).expand_as(input_ids)

    right, total = num_right(counts_padding)
    assert right < total, "GPT-2 should mind"
    with pytest.raises(AssertionError, match="position_ids should be"):
        check_tensors(counts_padding, SMALL, SMALL_PADDED)


def test_a_mask_made_of_the_pad_id_is_caught():
    def by_pad_id(prompts, pad_id=0):
        width = max(map(len, prompts))
        input_ids = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = (input_ids != pad_id).long()
        return input_ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)

    check_tensors(by_pad_id, SMALL, SMALL_PADDED)
    with pytest.raises(AssertionError, match="pad id 3: attention_mask should be"):
        check_a_pad_id_in_a_prompt_is_a_token(by_pad_id)
