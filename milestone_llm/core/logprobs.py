"""Log-probabilities of tokens, sampled ones and those of prompts, for requests that ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .outputs import Logprob
from .plan import ScheduledRequest


def logprob_columns(raw: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Log-probabilities of one token a row and of the most likely ones, in fp64, which holds all.

    Args:
        raw: logits `[num_rows, vocab_size]` fp32, before penalties, temperature and filters.
        token_ids: `[num_rows]` int64.
        num_top: at most vocab_size.

    Returns:
        `[num_rows, 2 + 2 * num_top]`: log-probability of the row's token, how many tokens are more
        likely, then the ids and the log-probabilities of the `num_top` most likely ones.
    """
    logprobs = raw.log_softmax(dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    num_above = (logprobs > own).sum(dim=-1, keepdim=True)
    # Which of tied values topk takes depends on k, so ids break ties: the bits of a float, with
    # all but the sign flipped where it is negative, order like the float; the id goes below them.
    bits = logprobs.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[-1], device=raw.device)
    top_ids = ((ordered << 32) - ids).topk(num_top).indices
    top = logprobs.gather(-1, top_ids)
    return torch.cat([column.double() for column in (own, num_above, top_ids, top)], dim=-1)


def prompt_logprobs(
    rows: list[ScheduledRequest], logits: Callable[[slice], Tensor]
) -> Iterator[tuple[ScheduledRequest, range, Tensor]]:
    """The columns of prompt tokens, for those rows whose requests want them; nothing waits for them.

    Args:
        logits: of a slice of all rows' `prompt_positions` in order, `[num_positions, vocab_size]`,
            each for the token that comes next.

    Yields:
        A row, some of its positions, and their `logprob_columns`.
    """
    first = 0
    for row in rows:
        positions, num_top = row.prompt_positions, row.request.sampling_params.prompt_logprobs or 0
        for some in range(0, len(positions), 64):  # as many as are converted to fp64 at a time
            part = positions[some : some + 64]
            raw = logits(slice(first, first + len(part))).float()
            own = [row.request.token_ids[position + 1] for position in part]
            own_ids = torch.tensor(own, pin_memory=raw.is_cuda).to(raw.device, non_blocking=True)
            yield row, part, logprob_columns(raw, own_ids, min(num_top, raw.shape[-1]))
            first += len(part)


def note_prompt_logprobs(row: ScheduledRequest, positions: range, columns: Tensor) -> None:
    """Write log-probabilities of prompt tokens into their row. Waits for the device."""
    num_wanted = row.request.sampling_params.prompt_logprobs or 0
    for position, numbers in zip(positions, columns.tolist(), strict=True):
        token_id = row.request.token_ids[position + 1]
        row.prompt_logprobs[position + 1] = read_logprobs(token_id, numbers, num_wanted)


def read_logprobs(token_id: int, columns: list[float], num_wanted: int) -> dict[int, Logprob]:
    """A row of `logprob_columns` for a `RequestOutput`: the token's own, then the top ones."""
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
