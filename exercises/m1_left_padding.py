"""M1, tensors: prompts of different lengths in one tensor.

A model takes a batch as one tensor `[num_rows, width]`, so shorter prompts are filled up with a pad
token. Decoder models are padded on the left: then the last column holds the last token of every
prompt, and the next tokens of all rows come from one column.

    prompts           input_ids       attention_mask   position_ids
    [7, 8, 9]         0 0 7 8 9       0 0 1 1 1        0 0 0 1 2
    [4, 5, 6, 7, 8]   4 5 6 7 8       1 1 1 1 1        0 1 2 3 4

Two more tensors tell the model which columns are padding. `attention_mask` is 1 for a real token
and 0 for a pad token. A pad token cannot be recognised by its id: a prompt may hold the pad id as a
real token. `position_ids` numbers the tokens of each prompt from 0, at any place in its row; pad
tokens have position 0. In models with rotary positions, a shift of a whole row does not matter,
since only distances count for them. In models with learned positions, such as GPT-2, it does.

The test computes the next token of each prompt with your tensors, on two tiny models, and compares
with the prompt alone.

    python -m pytest tests/exercises/test_m1_left_padding.py
"""

from __future__ import annotations

import torch


def pad_left(
    prompts: list[list[int]], pad_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `input_ids`, `attention_mask` and `position_ids`, each int64 `[num_rows, width]`.

    `width` is the length of the longest prompt.

    Hint: fill `input_ids` and `attention_mask` row by row. `position_ids` follows from the mask in
    one line: what is its `cumsum` along a row?
    """
    raise NotImplementedError
