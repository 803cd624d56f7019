"""From logits to tokens on the device, without a word from the host.

What the host's sampler (`milestone_llm.core.sampling`) does request by request is done here for
all rows of a step at once, from `DeviceState`: penalties, the kernel that filters and draws, and
log-probabilities for rows that want them. So a step may be launched before the last one's tokens
are known, whatever its requests ask for, and a decode step fits into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from milestone_llm.core.logprobs import logprob_columns
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.request import Request

from .device_state import MAX_DEVICE_STOP_IDS, DeviceState
from .kernels.sample import sample


class Needs(NamedTuple):
    """Which features the rows of a step use. Features that no row uses are not computed."""

    filters: bool = False
    """top-k, top-p or min-p."""
    penalties: bool = False
    """Repetition penalty, or no stop token yet (`min_tokens`)."""
    logprobs: bool = False

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Needs:
        """What these requests need in their next step."""
        filters = penalties = logprobs = False
        for request in requests:
            params = request.sampling_params
            filters |= params.top_k > 0 or params.top_p < 1 or params.min_p > 0
            penalties |= params.repetition_penalty != 1
            penalties |= request.num_output_tokens < params.min_tokens
            logprobs |= params.logprobs is not None
        return cls(filters, penalties, logprobs)


def needs_host_sampler(row: ScheduledRequest) -> bool:
    """Whether the device cannot do it: several requests begin with the row (n > 1), or it samples
    while `min_tokens` bans more stop tokens than the device knows."""
    request = row.request
    return len(row.sampling_requests) > 1 or (
        row.samples
        and len(request.stop_token_ids) > MAX_DEVICE_STOP_IDS
        and request.num_output_tokens < request.sampling_params.min_tokens
    )


class Sampler:
    """Samples for rows of `state`."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self._raw: torch.Tensor | None = None  # last logits: those of a graph are gone with it

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, needs: Needs
    ) -> torch.Tensor:
        """Choose a token for each sequence of a step; can be part of a CUDA graph.

        Args:
            logits: `[num_seqs, vocab_size]`.
            rows: int32 `[num_seqs]`, row of state of each; -1 for none.
            positions: int32 `[num_seqs]`, index of the output token.

        Returns:
            int32 `[num_seqs]`; -1 where the logits are not finite.
        """
        state = self.state
        if needs.logprobs:
            if self._raw is None:
                self._raw = logits.new_empty(state.num_seqs, logits.shape[-1])
            self._raw[: len(logits)] = logits
        if needs.penalties:
            logits = self._penalised(logits.float(), rows.clamp(min=0), positions)
        return sample(
            logits, rows, state.temperature, state.top_k, state.top_p, state.min_p, state.seeds,
            positions, needs.filters,
        )  # fmt: skip

    def logprobs(self, seqs: list[int], tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """Log-probabilities for some sequences of the step that was sampled last, by raw logits.

        Args:
            tokens: int32 `[num_seqs]`, what `sample` returned.
            num_top: how many of the most likely tokens are wanted; all, if there are not so many.

        Returns:
            fp64 `[len(seqs), 2 + 2 * num_top]`, see `logprob_columns`.
        """
        assert self._raw is not None
        index = torch.tensor(seqs, pin_memory=tokens.is_cuda)
        index = index.to(tokens.device, non_blocking=True)
        own = tokens[index].clamp(min=0).long()
        raw = self._raw[index].float()
        return logprob_columns(raw, own, min(num_top, raw.shape[-1]))

    def _penalised(
        self, raw: torch.Tensor, index: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Scores `[num_seqs, vocab_size]` after repetition penalty and `min_tokens`, in fp32."""
        state = self.state
        num_known = (state.rows.prompt_lens[index] + positions)[:, None]
        ids = state.rows.token_ids[index].long()
        # After the last known token stands its first again: writing the same twice does no harm.
        columns = torch.arange(ids.shape[1], device=ids.device)
        ids = torch.where(columns < num_known, ids, ids[:, :1])
        penalty = state.repetition_penalty[index][:, None]
        seen = raw.gather(1, ids)
        scores = raw.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))
        stops = state.stop_ids[index].long()
        may_stop = (positions >= state.min_tokens[index])[:, None]
        banned = scores.gather(1, stops).masked_fill(~may_stop, -torch.inf)
        return scores.scatter(1, stops, banned)
