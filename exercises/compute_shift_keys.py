"""Compute: move cached keys to other positions, without the tokens that they came from.

A chat outgrows its cache. A way out (context shift, StreamingLLM) is to drop the oldest tokens and
let the others move up, so that positions begin at 0 again:

    cached      0 1 2 3 4 5 6 7        position of each key
    dropped     . . . 3 4 5 6 7        three tokens are gone
    moved             0 1 2 3 4        the others three positions earlier

But a key in the cache has been rotated by its position (RoPE), and the key before that is gone. It
is not needed. What is rotation by position 7, and then rotation back by 3?

Write `shift_keys`. The test attends with your keys, and with keys that were rotated at the new
positions from the beginning: the scores must be equal. No key is computed again from its token.

(In layers above the first, keys still depend on the dropped tokens. Such engines accept that.)

    python -m pytest tests/exercises/test_compute_shift_keys.py
"""

from __future__ import annotations

import torch


def shift_keys(keys: torch.Tensor, by: int, theta: float) -> torch.Tensor:
    """Return rotated keys `[num_heads, num_tokens, head_dim]`, each moved by `by` positions (3, or
    -3).

    Hint: `rotate` in docs/questions/m0_transformer.py turns pair i, the numbers i and
    i + head_dim / 2, by position * theta ** (-i / (head_dim / 2)). Angles add up.
    """
    raise NotImplementedError
