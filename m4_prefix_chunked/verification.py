"""Verify draft tokens: sample before and after each of them, keep tokens up to the first error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.sampling import SamplingState, sample

from .speculation import GuessedRequest, accept, draft_token_ids


def sample_and_verify(
    rows: Sequence[ScheduledRequest], logits: torch.Tensor
) -> dict[str, list[SampledToken]]:
    """Return the tokens of each request that samples, by id: accepted draft tokens, then one more.

    Args:
        logits: for each of these requests, at the last `num_sampled_tokens` tokens of its row.
    """
    states: list[SamplingState] = []
    for row in rows:
        guesses = draft_token_ids(row)
        for request in row.sampling_requests:
            states.append(request)
            states += [GuessedRequest(request, guesses[:num]) for num in range(1, 1 + len(guesses))]
    tokens = sample(logits, states)
    left = iter(tokens)
    return {
        request.request_id: accept(
            draft_token_ids(row), [next(left) for _ in range(row.num_sampled_tokens)]
        )
        for row in rows
        for request in row.sampling_requests
    }
