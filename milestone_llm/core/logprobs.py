"""Log-probabilities of tokens, for requests that ask for them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .outputs import Logprob


def logprob_columns(raw: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Return log-probabilities of one token a row and of the `num_top` most likely, in fp64.

    Args:
        raw: logits `[num_rows, vocab_size]` fp32, before penalties, temperature and filters.
        token_ids: `[num_rows]` int64.

    Returns:
        `[num_rows, 2 + 2 * num_top]`: log-probability of the row's token, how many tokens are more
        likely, then the ids and the log-probabilities of the `num_top` most likely ones.
    """
    # A GPU sums a row in another order if it does not begin at a multiple of 16 bytes.
    if padding := -raw.shape[-1] % 4:
        raw = F.pad(raw, (0, padding), value=-torch.inf)
    logprobs = raw.log_softmax(dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    num_above = (logprobs > own).sum(dim=-1, keepdim=True)
    # Which of tied values topk takes depends on k. So ids break ties: the bits of a float, with
    # all but the sign flipped where it is negative, order like the float; the id goes below them.
    bits = logprobs.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[-1], device=raw.device)
    top_ids = ((ordered << 32) - ids).topk(num_top).indices
    top = logprobs.gather(-1, top_ids)
    return torch.cat([column.double() for column in (own, num_above, top_ids, top)], dim=-1)


def read_logprobs(token_id: int, columns: list[float], num_wanted: int) -> dict[int, Logprob]:
    """Turn a row of `logprob_columns` into logprobs by token id, for a `RequestOutput`: those of
    the row's token, then those of the most likely tokens."""
    num_top = (len(columns) - 2) // 2
    own = {token_id: Logprob(columns[0], int(columns[1]) + 1)}
    top: dict[int, Logprob] = {}
    rank, previous = 0, math.inf
    pairs = zip(columns[2 : 2 + num_top], columns[2 + num_top :], strict=True)
    for place, (top_id, logprob) in enumerate(list(pairs)[:num_wanted], start=1):
        rank = rank if logprob == previous else place  # equally likely tokens share a rank
        previous = logprob
        top[int(top_id)] = Logprob(logprob, rank)
    return own | top
