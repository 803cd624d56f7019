"""Bring what a step computes to the host: tokens and log-probabilities, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from milestone_llm.core.logprobs import read_logprobs
from milestone_llm.core.outputs import Logprob, SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.prompt_logprobs import prompt_logprobs
from milestone_llm.core.request import Request
from milestone_llm.core.sampling import sample

from .decoder.load import Decoder
from .kernels.launch import PLAIN, Launch
from .sampler import Sampler

NUM_TURNS = 4
"""Number of buffers: more than there are ever steps in flight."""
PromptLogprobs = list[tuple[ScheduledRequest, range, torch.Tensor]]
"""A row, some of its prompt positions, and their columns (`logprob_columns`) in host memory."""


def prompt_logprobs_of(
    rows: list[ScheduledRequest], hidden: torch.Tensor, decoder: Decoder, launch: Launch
) -> PromptLogprobs:
    """Start copying the log-probabilities of prompt tokens to the host, without waiting."""
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
            rows, lambda some: decoder.logits(hidden[index[some]], launch)
        )
    ]


def sample_on_host(
    rows: list[ScheduledRequest], last_hidden: torch.Tensor, decoder: Decoder, launch: Launch
) -> tuple[dict[str, list[SampledToken]], list[int]]:
    """Sample with M1's sampler. A row where several completions begin gets a token for each.

    last_hidden: the hidden state of each row's last token, `[num_rows, hidden_size]`.
    Returns the tokens by request id, and one token id a row: -1 for a row that samples nothing.
    """
    seqs = [seq for seq, row in enumerate(rows) for _ in row.sampling_requests]
    requests = [request for row in rows for request in row.sampling_requests]
    tokens = sample(decoder.logits(last_hidden[seqs], launch), requests)
    sampled = {request.request_id: [token] for request, token in zip(requests, tokens, strict=True)}
    ids = [sampled[row.request.request_id][0].token_id if row.samples else -1 for row in rows]
    return sampled, ids


CopyToHost = Callable[..., None]
"""`copy_to_host`, or a function that takes its place."""


def copy_to_host(source: torch.Tensor, target: torch.Tensor, launch: Launch = PLAIN) -> None:
    """Start a copy to the host. From a GPU its copy engine copies, into pinned memory."""
    target.copy_(source, non_blocking=True)


class HostTokens:
    """Host memory for the tokens of steps in flight: a ring of buffers.

    The device writes there until the last step is done, even if nothing has waited for that step.
    So the memory is only freed after that.

    Args:
        copy: copies int32 tokens into a buffer, without waiting.
    """

    def __init__(
        self, num_seqs: int, device: torch.device, copy: CopyToHost = copy_to_host
    ) -> None:
        self._copy = copy
        self.last: torch.cuda.Event | None = None
        """Recorded at the end of the last step that was written here."""
        self._turns = cycle(
            [
                torch.empty(num_seqs, dtype=torch.int32, pin_memory=device.type == "cuda")
                for _ in range(NUM_TURNS)
            ]
        )

    def __del__(self) -> None:
        if self.last is not None:
            self.last.synchronize()

    def take(self, tokens: torch.Tensor, launch: Launch = PLAIN) -> torch.Tensor:
        """Return a copy of int32 tokens, valid for `NUM_TURNS` steps. It may still be under way."""
        on_host = next(self._turns)[: len(tokens)]
        self._copy(tokens, on_host, launch)
        return on_host


def fetch(
    requests: Sequence[Request | None],
    tokens: torch.Tensor,
    sampler: Sampler,
    host_tokens: HostTokens,
) -> Callable[[], list[SampledToken]]:
    """Start copying tokens to the host, and return a function that waits for them.

    requests: the request of each sequence; None where the sequence samples nothing that is wanted.
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


def on_its_way(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a tensor to the host, and return a function that waits for the copy."""
    if not tensor.is_cuda:
        return lambda: tensor
    on_host, done = _to_host(tensor), torch.cuda.Event()
    done.record()

    def read() -> torch.Tensor:
        done.synchronize()
        return on_host

    return read


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which is still under way if the tensor is on a GPU."""
    if not tensor.is_cuda:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
