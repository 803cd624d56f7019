"""What a step brings travels to the host: tokens, log-probabilities. Nothing here waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from m4_prefix_chunked.speculation import GuessingRow
from milestone_llm.core.logprobs import read_logprobs
from milestone_llm.core.outputs import Logprob, SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs, prompt_logprobs

from .decoder.decoder import FusedDecoder
from .kernels.guesses import MISSING, REJECTED
from .kernels.write_to_host import write_to_host
from .sampler import Sampler

NUM_TURNS = 4
"""More steps than are ever in flight."""
PromptLogprobs = list[tuple[ScheduledRequest, range, torch.Tensor]]
"""A row, some of its prompt positions, and their columns (`logprob_columns`) in host memory."""


def prompt_logprobs_of(
    rows: list[ScheduledRequest], hidden: torch.Tensor, decoder: FusedDecoder
) -> PromptLogprobs:
    """Those of prompt tokens, on their way to the host; nothing waits for them here."""
    places, start = [], 0
    for row in rows:
        places += [start + position - row.start for position in row.prompt_positions]
        start += row.num_new_tokens
    if not places:
        return []
    index = torch.tensor(places, pin_memory=hidden.is_cuda)
    index = index.to(hidden.device, non_blocking=True)
    return [
        (row, positions, _to_host(columns))
        for row, positions, columns in prompt_logprobs(
            rows, lambda some: decoder.logits(hidden[index[some]])
        )
    ]


class HostTokens:
    """Host memory for the tokens of steps in flight, which take turns.

    It is given back when the last step is done, which nobody may have waited for: until then a
    kernel writes there.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.last: torch.cuda.Event | None = None
        """The end of the last step that was written here."""
        self._turns = cycle(
            [
                torch.empty(num_places, dtype=torch.int32, pin_memory=device.type == "cuda")
                for _ in range(NUM_TURNS)
            ]
        )

    def __del__(self) -> None:
        if self.last is not None:
            self.last.synchronize()

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """A copy of int32 tokens, under way if they are on a GPU; good for `NUM_TURNS` steps."""
        on_host = next(self._turns)[: len(tokens)]
        write_to_host(tokens, on_host)
        return on_host


def fetch(
    places: Sequence[ScheduledRequest | None],
    tokens: torch.Tensor,
    of_prompts: PromptLogprobs,
    sampler: Sampler,
    host_tokens: HostTokens,
) -> Callable[[], dict[str, list[SampledToken]]]:
    """Start the tokens' way to the host; what is returned waits for them.

    places: the row whose token each place has; None where it is nobody's. On a row that guesses it
        is noted how many guesses the device did not make.
    """
    wanted = {
        place: row.request.sampling_params.logprobs
        for place, row in enumerate(places)
        if row is not None and row.request.sampling_params.logprobs is not None
    }
    columns = sampler.logprobs(list(wanted), tokens, max(wanted.values())) if wanted else None
    token_copy = host_tokens.take(tokens[: len(places)])
    column_copy = None if columns is None else _to_host(columns)
    done = torch.cuda.Event() if tokens.is_cuda else None
    if done is not None:
        done.record()
        host_tokens.last = done

    def read() -> dict[str, list[SampledToken]]:
        if done is not None:
            done.synchronize()
        for entry in of_prompts:
            note_prompt_logprobs(*entry)
        token_ids = token_copy.tolist()
        logprobs: dict[int, dict[int, Logprob]] = {}
        if column_copy is not None:
            for (place, num_wanted), own in zip(wanted.items(), column_copy.tolist(), strict=True):
                logprobs[place] = read_logprobs(token_ids[place], own, num_wanted)
        sampled: dict[str, list[SampledToken]] = {}
        for place, (row, token_id) in enumerate(zip(places, token_ids, strict=True)):
            if row is None or token_id == REJECTED:
                continue
            if token_id == MISSING:
                assert isinstance(row, GuessingRow)
                row.num_missing += 1
                continue
            token = SampledToken(token_id, logprobs.get(place))
            sampled.setdefault(row.request.request_id, []).append(token)
        return sampled

    return read


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, which is under way if the tensor is on a GPU."""
    if not tensor.is_cuda:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
