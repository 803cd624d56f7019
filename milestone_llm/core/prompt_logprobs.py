"""Log-probabilities of prompt tokens, for rows whose requests ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .logprobs import logprob_columns, read_logprobs
from .plan import ScheduledRequest


def prompt_logprobs(
    rows: list[ScheduledRequest], logits: Callable[[slice], Tensor]
) -> Iterator[tuple[ScheduledRequest, range, Tensor]]:
    """Yield the `logprob_columns` of prompt tokens, for rows whose requests want them. Does not
    wait for the device.

    Args:
        logits: returns the logits for a slice of all rows' `prompt_positions` in order,
            `[num_positions, vocab_size]`, each for the token that comes next.

    Yields:
        A row, some of its positions, and their `logprob_columns`.
    """
    first = 0
    for row in rows:
        positions, num_top = row.prompt_positions, row.request.sampling_params.prompt_logprobs or 0
        for some in range(0, len(positions), 64):  # 64 positions are converted to fp64 at a time
            part = positions[some : some + 64]
            raw = logits(slice(first, first + len(part))).float()
            own = [row.request.token_ids[position + 1] for position in part]
            own_ids = torch.tensor(own, pin_memory=raw.is_cuda).to(raw.device, non_blocking=True)
            yield row, part, logprob_columns(raw, own_ids, min(num_top, raw.shape[-1]))
            first += len(part)


def note_prompt_logprobs(row: ScheduledRequest, positions: range, columns: Tensor) -> None:
    """Give log-probabilities of prompt tokens to the row's request. Waits for the device."""
    request = row.request
    num_wanted = request.sampling_params.prompt_logprobs or 0
    for position, numbers in zip(positions, columns.tolist(), strict=True):
        if position + 1 == len(request.prompt_logprobs):  # else they are known already
            token_id = request.token_ids[position + 1]
            request.prompt_logprobs.append(read_logprobs(token_id, numbers, num_wanted))
