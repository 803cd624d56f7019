"""M2, tensors: requests of any lengths in one row of tokens, and which token may see which.

M2 computes a step as one flat batch: the new tokens of all its rows follow one another, without any
padding. Only attention looks across tokens, so only attention must know where a request begins. A
mask can say it. Let a step have two rows: a prompt of 3 tokens, and a request with 4 tokens in the
cache that decodes its fifth. Their keys follow one another, too:

    rows = [(0, 3), (4, 1)]        (start, num_new_tokens) of each
                                             keys of row 0   keys of row 1
                                              0  1  2         0  1  2  3  4
    tokens of row 0   position 0              1  .  .         .  .  .  .  .
                      position 1              1  1  .         .  .  .  .  .
                      position 2              1  1  1         .  .  .  .  .
    token of row 1    position 4              .  .  .         1  1  1  1  1

A token sees the keys of its own request, up to its own position. Return the positions and the mask.
Build them from whole tensors, not token by token: no loop over tokens, at most one over rows.

The test gives mask and positions to a tiny model, and compares each prompt's next token with that
of the prompt alone. It also prints the share of scores that are needed. All others are computed for
nothing, which is why M2 (m2_batching/attention.py) takes prompts one by one.

    python -m pytest tests/exercises/test_m2_flat_mask.py
"""

from __future__ import annotations

import torch


def flatten(rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions, int64 `[num_tokens]`, and the mask, bool `[num_tokens, num_keys]`.

    Args:
        rows: `(start, num_new_tokens)` of each request. It has `start + num_new_tokens` keys.

    Hint: for every token make its row and its position, for every key likewise (`torch.arange`,
    `torch.cat`, `torch.full`). Then compare them all with all: `a[:, None] == b[None, :]`.
    """
    raise NotImplementedError
