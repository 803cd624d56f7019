"""Checks exercises/m1_left_padding.py."""

import torch

from helpers.engines import random_prompts, tiny_model

EXERCISE = ("m1_left_padding.py", "pad_left")
NAMES = ("input_ids", "attention_mask", "position_ids")
FAMILIES = ("llama", "gpt2")  # rotary and learned positions
LENGTHS = [3, 11, 7, 24]


def padded_on_the_right(prompts, pad_id=0):
    width = max(map(len, prompts))
    input_ids = torch.tensor([prompt + [pad_id] * (width - len(prompt)) for prompt in prompts])
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    positions = torch.arange(width).expand_as(input_ids)
    return input_ids, (positions < lengths).long(), positions


WRONG, TOLD = padded_on_the_right, "input_ids should be"


@torch.inference_mode()
def num_right(pad_left):
    """Prompts whose next token in the batch is the one that they get alone, over two models."""
    prompts = random_prompts(LENGTHS)
    tensors = dict(zip(NAMES, pad_left(prompts), strict=True))
    count = 0
    for family in FAMILIES:
        model = tiny_model(family)
        alone = [model(torch.tensor([prompt])).logits[0, -1].argmax() for prompt in prompts]
        together = model(**tensors).logits[:, -1].argmax(-1)
        count += sum(a == b for a, b in zip(alone, together, strict=True))
    return int(count)


def check_tensors(pad_left, prompts, wanted, pad_id=0):
    for name, tensor, rows in zip(NAMES, pad_left(prompts, pad_id), wanted, strict=True):
        assert tensor.dtype == torch.int64, f"{name} should be int64, it is {tensor.dtype}"
        assert tensor.tolist() == rows, (
            f"prompts {prompts}, pad id {pad_id}: {name} should be\n{torch.tensor(rows)}, "
            f"yours is\n{tensor}"
        )


def test_two_prompts(exercise):
    wanted = (
        [[0, 0, 7, 8, 9], [4, 5, 6, 7, 8]],
        [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
        [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]],
    )
    check_tensors(exercise, [[7, 8, 9], [4, 5, 6, 7, 8]], wanted)


def test_a_pad_id_in_a_prompt_is_a_token(exercise):
    wanted = [[3, 5, 3], [3, 3, 3]], [[0, 1, 1], [1, 1, 1]], [[0, 0, 1], [0, 1, 2]]
    check_tensors(exercise, [[5, 3], [3, 3, 3]], wanted, pad_id=3)


def test_the_next_tokens_are_those_of_each_prompt_alone(exercise, figure):
    right, total = num_right(exercise), len(LENGTHS) * len(FAMILIES)
    before = num_right(padded_on_the_right)
    figure("right next tokens", f"{right} of {total}", f"{before} (padded on the right)")
    assert right == total, f"{right} of {total} next tokens are those of the prompt alone"
