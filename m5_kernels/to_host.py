"""What a step brings travels to the host: tokens, log-probabilities. Nothing here waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from milestone_llm.core.logprobs import read_logprobs
from milestone_llm.core.outputs import Logprob, SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.prompt_logprobs import prompt_logprobs
from milestone_llm.core.request import Request

from .decoder.decoder import FusedDecoder
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


CopyToHost = Callable[[torch.Tensor, torch.Tensor], None]


def copy_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """By the GPU's copy engine, if there is a GPU; target: in pinned memory then."""
    target.copy_(source, non_blocking=True)


class HostTokens:
    """Host memory for the tokens of steps in flight, which take turns.

    It is given back when the last step is done, which nobody may have waited for: until then the
    device writes there.

    Args:
        copy: brings int32 tokens there, without waiting.
    """

    def __init__(
        self, num_seqs: int, device: torch.device, copy: CopyToHost = copy_to_host
    ) -> None:
        self._copy = copy
        self.last: torch.cuda.Event | None = None
        """The end of the last step that was written here."""
        self._turns = cycle(
            [
                torch.empty(num_seqs, dtype=torch.int32, pin_memory=device.type == "cuda")
                for _ in range(NUM_TURNS)
            ]
        )

    def __del__(self) -> None:
        if self.last is not None:
            self.last.synchronize()

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """A copy of int32 tokens, under way if they are on a GPU; good for `NUM_TURNS` steps."""
        on_host = next(self._turns)[: len(tokens)]
        self._copy(tokens, on_host)
        return on_host


def fetch(
    requests: Sequence[Request | None],
    tokens: torch.Tensor,
    sampler: Sampler,
    host_tokens: HostTokens,
) -> Callable[[], list[SampledToken]]:
    """Start the tokens' way to the host; what is returned waits for them.

    requests: whose token each sequence has; None where it samples nothing that is wanted.
    """
    wanted = {
        seq: request.sampling_params.logprobs
        for seq, request in enumerate(requests)
        if request is not None and request.sampling_params.logprobs is not None
    }
    columns = sampler.logprobs(list(wanted), tokens, max(wanted.values())) if wanted else None
    token_copy = host_tokens.take(tokens[: len(requests)])
    column_copy = None if columns is None else _to_host(columns)
    done = torch.cuda.Event() if tokens.is_cuda else None
    if done is not None:
        done.record()
        host_tokens.last = done

    def read() -> list[SampledToken]:
        if done is not None:
            done.synchronize()
        token_ids = token_copy.tolist()
        logprobs: dict[int, dict[int, Logprob]] = {}
        if column_copy is not None:
            for (seq, num_wanted), row in zip(wanted.items(), column_copy.tolist(), strict=True):
                logprobs[seq] = read_logprobs(token_ids[seq], row, num_wanted)
        return [SampledToken(each, logprobs.get(seq)) for seq, each in enumerate(token_ids)]

    return read


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, which is under way if the tensor is on a GPU."""
    if not tensor.is_cuda:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
